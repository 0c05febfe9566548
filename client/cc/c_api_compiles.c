// The header is C, and a struct can be made as it says.
#include "client/cc/c_api.h"

size_t weightsync_test_size_of_options(void) {
  weightsync_publish_options options;
  WEIGHTSYNC_INIT(options);
  return options.struct_size + (size_t)options.version;
}
