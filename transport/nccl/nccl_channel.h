// The bytes of one edge of a chain, over a communicator of NCCL that only this
// edge has. BROADCAST, too, is a chain of such pairs and no ncclBroadcast: a
// collective that fails does not say at whom, and takes all of its members
// along.
//
// Several edges of one GPU run at once, each with a communicator and streams of
// its own. NCCL's manual warns of that ("Using multiple NCCL communicators
// concurrently"): CUDA does not promise that two streams run beside each other,
// and where A's kernel for one edge stands before that for the other, and B's
// the other way round, both wait for ever. Three ways round it were weighed:
// - One operation at a time on each GPU, or a lock on the issue of each. Then A
//   holds its own while it waits for B, and B, for an edge in the other
//   direction, while it waits for A: what may happen becomes what must. An
//   issue is no moment, either: the first operation between two ranks meets the
//   peer on the host.
// - One order for all edges, agreed on by both ends of each before every piece.
//   It is safe whatever CUDA does, and costs a round trip for each piece; and a
//   node in the middle of a chain no longer receives while it sends, where CUDA
//   keeps to the order.
// - As it is: nothing here holds a lock, or a place in another edge's stream,
//   while it waits for a peer. An operation is issued when its receiver has
//   said that it is about to receive, so that no kernel waits for one that
//   nobody has asked for. What NCCL allocates, and may wait for a whole GPU
//   with, it allocates when an edge connects. What is left is the hardware.
//   Kernels of an agent fit together: maxCTAs (4) of a hundred SMs and more for
//   each edge. Streams do not share a queue: an agent asks CUDA for 32
//   (CUDA_DEVICE_MAX_CONNECTIONS), and a queue that were shared beyond that is
//   what the deadline is for: it is one of progress, the edge is lost and
//   aborted, and the update is made again without it or fails by name. Never
//   does anything wait for ever.
#ifndef WEIGHTSYNC_TRANSPORT_NCCL_NCCL_CHANNEL_H_
#define WEIGHTSYNC_TRANSPORT_NCCL_NCCL_CHANNEL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/nccl/nccl_device.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/payload_channel.h"

namespace weightsync {
namespace transport {
namespace nccl {

// One end of an edge to `peer`. FAILED_PRECONDITION when the device is lost.
absl::StatusOr<std::unique_ptr<tcp::PayloadChannel>> NewNcclChannel(
    NcclDevice* device, const std::string& peer);

// A node's way into groups whose bytes go over NCCL: an Endpoint for everything
// else, whose edges have channels of `device`, which outlives it.
//
// A group of memory.h's kind is a chain, and a chain over NCCL is a
// communicator of two for each of its edges: so it can lose a member, be joined
// by one, and blame an edge, which a communicator over all cannot. The price is
// that a bucket is sent on by each node, as over TCP; the wires carry as much
// either way.
absl::StatusOr<std::unique_ptr<tcp::Endpoint>> CreateNcclEndpoint(
    tcp::EndpointOptions options, NcclDevice* device);

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_NCCL_NCCL_CHANNEL_H_
