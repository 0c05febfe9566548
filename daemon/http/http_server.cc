#include "daemon/http/http_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "civetweb.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

namespace {

// Each is with one caller until he has said what he wants, at most for
// kRequestTimeout: who connects and is silent must not keep a probe waiting.
constexpr char kThreads[] = "16";
constexpr char kRequestTimeout[] = "1000";  // ms

int Reply(mg_connection* connection, int code, const std::string& type,
          const std::string& body, bool head) {
  mg_printf(connection,
            "HTTP/1.1 %d %s\r\n"
            "Content-Type: %s\r\n"
            "Content-Length: %zu\r\n"
            "Cache-Control: no-store\r\n"
            "%s"
            "Connection: close\r\n"
            "\r\n",
            code, mg_get_response_code_text(connection, code), type.c_str(),
            body.size(), code == 405 ? "Allow: GET, HEAD\r\n" : "");
  if (!head) mg_write(connection, body.data(), body.size());
  return code;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(
    const std::string& address, std::vector<HttpPage> pages) {
  const char* options[] = {"listening_ports",
                           address.c_str(),
                           "num_threads",
                           kThreads,
                           "request_timeout_ms",
                           kRequestTimeout,
                           "enable_directory_listing",
                           "no",
                           nullptr};
  mg_callbacks callbacks = {};
  callbacks.begin_request = &HttpServer::OnRequest;
  callbacks.log_message = [](const mg_connection*, const char* message) {
    LOG(WARNING) << "HTTP: " << message;
    return 1;
  };
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(pages)));
  server->server_ = mg_start(&callbacks, server.get(), options);
  mg_server_port port = {};
  if (server->server_ == nullptr ||
      mg_get_server_ports(server->server_, 1, &port) != 1) {
    return ErrorStatus(
        absl::StatusCode::kUnavailable, "LISTEN_FAILED",
        absl::StrCat("cannot serve HTTP at ", address,
                     ": is another process there already, or is it no address "
                     "of this machine?"));
  }
  server->port_ = port.port;
  return server;
}

HttpServer::~HttpServer() {
  if (server_ != nullptr) mg_stop(server_);
}

int HttpServer::OnRequest(mg_connection* connection) {
  return static_cast<HttpServer*>(mg_get_user_data(mg_get_context(connection)))
      ->Answer(connection);
}

int HttpServer::Answer(mg_connection* connection) {
  const mg_request_info* request = mg_get_request_info(connection);
  const absl::string_view method = request->request_method;
  const bool head = method == "HEAD";
  constexpr char kText[] = "text/plain; charset=utf-8";
  if (method != "GET" && !head) {
    return Reply(connection, 405, kText, "Pages are read with GET.\n", false);
  }
  std::string known;
  for (const HttpPage& page : pages_) {
    absl::StrAppend(&known, " ", page.path);
    if (request->local_uri != page.path) continue;
    absl::StatusOr<std::string> body = page.make();
    if (!body.ok()) {
      return Reply(connection, 503, kText,
                   absl::StrCat(ErrorReason(body.status()), ": ",
                                body.status().message(), "\n"),
                   head);
    }
    return Reply(connection, 200, page.content_type, *body, head);
  }
  return Reply(connection, 404, kText,
               absl::StrCat("There is no such page; there is:", known, "\n"),
               head);
}

}  // namespace daemon
}  // namespace weightsync
