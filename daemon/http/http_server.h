// A few pages over plain HTTP, for those who look: Prometheus, probes, people.
// Nothing can be changed through it.

#ifndef WEIGHTSYNC_DAEMON_HTTP_HTTP_SERVER_H_
#define WEIGHTSYNC_DAEMON_HTTP_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

struct mg_connection;
struct mg_context;

namespace weightsync {
namespace daemon {

struct HttpPage {
  // "/metrics".
  std::string path;
  std::string content_type;
  // The body. Called on threads of the server, several at once; may take as
  // long as the caller is to wait. An error is answered with 503 and its
  // sentence.
  std::function<absl::StatusOr<std::string>()> make;
};

// Thread-safe. Ends with the object, when no page is being made any more.
class HttpServer {
 public:
  // `address`: "HOST:PORT" with a numeric host; port 0 takes a free one.
  // A caller has a second to say what he wants.
  //   UNAVAILABLE (LISTEN_FAILED).
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const std::string& address, std::vector<HttpPage> pages);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Chosen by the kernel where it was given as 0.
  int port() const { return port_; }

 private:
  explicit HttpServer(std::vector<HttpPage> pages) : pages_(std::move(pages)) {}

  static int OnRequest(mg_connection* connection);
  int Answer(mg_connection* connection);

  const std::vector<HttpPage> pages_;
  mg_context* server_ = nullptr;
  int port_ = 0;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_HTTP_HTTP_SERVER_H_
