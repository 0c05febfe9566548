#ifndef WEIGHTSYNC_TESTS_BENCH_PLAIN_SOCKETS_H_
#define WEIGHTSYNC_TESTS_BENCH_PLAIN_SOCKETS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace weightsync {
namespace bench {

// The floor that transfers are measured against: bytes through plain blocking
// sockets, without frames or digests. Errors end the process.

// Listens on host:port.
int ListenPlain(const std::string& host, int port);
int AcceptPlain(int listener);
// Tries for 20 seconds.
int ConnectPlain(const std::string& host, int port);

void WriteAll(int fd, const void* data, int64_t bytes);
void ReadAll(int fd, void* data, int64_t bytes);
void WriteLine(int fd, const std::string& line);
std::string ReadLine(int fd);

// Sends an equal part of the bytes on each socket, on a thread each, and waits
// for an answer on each.
void SendPlain(const std::vector<int>& sockets, const char* data,
               int64_t bytes);
// The other end.
void ReceivePlain(const std::vector<int>& sockets, char* data, int64_t bytes);

}  // namespace bench
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_BENCH_PLAIN_SOCKETS_H_
