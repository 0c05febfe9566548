// The device agent: the process that has a GPU.
//
// It holds the context, the slots and what trainers have exported, and does
// what the daemon that started it asks. It decides nothing and remembers
// nothing that matters: what happens to it costs one GPU a moment.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_SERVER_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_SERVER_H_

namespace weightsync {
namespace transport {
namespace cuda {

// Exit codes of an agent.
constexpr int kAgentEnded = 0;        // its daemon closed the socket
constexpr int kAgentDeviceLost = 70;  // a fault, or work that does not end

// Serves the daemon at the other end of `socket` until that is gone, or the GPU
// is lost to this process. Does not return in the second case: whatever else
// would end may hang.
int RunDeviceAgent(int socket);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_SERVER_H_
