/* The client library for other languages: the trainer's and the inference side
 * over a C ABI (libweightsync.so). What each call means is said with the C++
 * classes that stand behind it: client/cc/trainer.h, worker.h and replica.h.
 * Here is what a C ABI adds.
 *
 * Errors. Calls that can fail return a weightsync_error, NULL for success; the
 * caller frees it. Nothing throws, and nothing aborts for a wrong argument: a
 * NULL where there must be none is INVALID_ARGUMENT (ARGUMENT_MISSING).
 *
 * Ownership. Everything that is passed in is copied before the call returns,
 * except the memory that `data` of a tensor or of shared memory points to, and
 * `user`, which must outlive the object. What comes out is written into the
 * caller's structs. Handles are freed by their _free, which closes first.
 *
 * Structs grow at their end. The first member of what is passed in is its size
 * (WEIGHTSYNC_INIT), so that a program and a library of different releases
 * understand each other; members that a program does not know are 0, and 0 is
 * always the default.
 *
 * Threads. Handles may be used from several threads; _free must be the last use
 * of one. Callbacks come on threads of the library, one at a time for each
 * handle; they must not free or close the handle that calls them. A child of
 * fork() has none of these threads: it must not touch a handle of its parent,
 * not even to free it.
 *
 * Times are seconds. Strings are UTF-8 and end with a NUL; those that do not
 * fit their array are cut. Enumerations have the numbers of
 * proto/weightsync/v1/types.proto and admin.proto.
 */
#ifndef WEIGHTSYNC_CLIENT_CC_C_API_H_
#define WEIGHTSYNC_CLIENT_CC_C_API_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when something that exists changes its meaning; additions leave it. */
#define WEIGHTSYNC_ABI_VERSION 2
int32_t weightsync_abi_version(void);

/* weightsync_publish_options options;
 * WEIGHTSYNC_INIT(options); */
#define WEIGHTSYNC_INIT(variable)                   \
  (memset((void*)&(variable), 0, sizeof(variable)), \
   (void)((variable).struct_size = sizeof(variable)))

/* ---- Errors ---- */

typedef struct weightsync_error weightsync_error;

/* google.rpc.Code. */
int32_t weightsync_error_code(const weightsync_error* error);
/* UPPER_SNAKE; the contract. */
const char* weightsync_error_reason(const weightsync_error* error);
/* A sentence that says what to do. */
const char* weightsync_error_message(const weightsync_error* error);
/* "call" and, where there is one, "object": which rank, worker or replica. */
size_t weightsync_error_metadata_count(const weightsync_error* error);
const char* weightsync_error_metadata_key(const weightsync_error* error,
                                          size_t index);
const char* weightsync_error_metadata_value(const weightsync_error* error,
                                            size_t index);
void weightsync_error_free(weightsync_error* error);

/* How a callback answers that something failed. Not called: it succeeded. */
typedef struct weightsync_answer weightsync_answer;
/* `code` 0 counts as UNKNOWN; `reason` NULL as "HOOK_FAILED". */
void weightsync_answer_fail(weightsync_answer* answer, int32_t code,
                            const char* reason, const char* message);
/* What was done, for people: "drained 3 requests". Only of on_pause. */
void weightsync_answer_detail(weightsync_answer* answer, const char* detail);

/* ---- For all ---- */

/* What the library logs to stderr: 0 all, 1 warnings, 2 errors, 3 nothing but
 * what ends the process. 2 until this is called. */
void weightsync_set_log_level(int32_t level);

/* 32 hexadecimal digits that nobody can guess: an incarnation, a request_id. */
void weightsync_random_id(char id[33]);

/* Where the daemon of this machine is when nobody says it. */
void weightsync_default_address(char address[256]);

/* Added to dtype: `data` is an address of GPU memory of this process. A library
 * that does not know it answers DTYPE_UNKNOWN. */
#define WEIGHTSYNC_ON_GPU 0x10000

/* Added to dtype, for trainers: the elements lie here as `stored` (of DType),
 * and are cast by the daemon when it copies them out. */
#define WEIGHTSYNC_STORED_AS(stored) ((stored) << 8)

typedef struct weightsync_tensor {
  const char* name;
  /* Of DType, WEIGHTSYNC_STORED_AS and WEIGHTSYNC_ON_GPU. */
  int32_t dtype;
  int32_t dimensions;
  /* Of the whole parameter. */
  const int64_t* shape;
  /* Which part of it lies here; both NULL: all of it. */
  const int64_t* offset;
  const int64_t* extent;
  /* In elements; NULL: dense, row-major. */
  const int64_t* strides;
  void* data;
  /* NULL: "main". */
  const char* component;
} weightsync_tensor;

/* ---- Trainers ---- */

typedef struct weightsync_trainer weightsync_trainer;

typedef struct weightsync_trainer_options {
  size_t struct_size;
  /* NULL: the daemon of this machine. */
  const char* address;
  const char* model;
  int32_t rank;
  /* 0: 1. */
  int32_t world_size;
  /* What the program calls itself. */
  const char* client;
  /* 0: 20 s. */
  double connect_timeout;
  /* Not 0: do not open another session when the lease is lost. */
  int32_t no_reconnect;
} weightsync_trainer_options;

typedef struct weightsync_arena {
  char arena_id[64];
  void* data;
  int64_t size_bytes;
  double warm_up;
} weightsync_arena;

typedef struct weightsync_shared_memory {
  size_t struct_size;
  /* As given to shm_open. NULL: what `fd` is of. */
  const char* name;
  /* Used when `name` is NULL: shared memory, a memfd, or an unlinked file. It
   * stays the caller's, and may be closed. */
  int32_t fd;
  void* data;
  int64_t size_bytes;
} weightsync_shared_memory;

typedef struct weightsync_registered {
  int32_t registered_rank_count;
  int32_t world_size;
  int64_t shard_bytes;
} weightsync_registered;

typedef struct weightsync_publish_options {
  size_t struct_size;
  int64_t version;
  int64_t step;
  /* NULL: the library makes one up. */
  const char* request_id;
  /* 0: 150 s. */
  double timeout;
  /* Of PublishMode, UpdateMode, PauseMode, TransferPolicy, DeliveryPolicy. */
  int32_t publish_mode;
  int32_t update_mode;
  int32_t pause_mode;
  int32_t transfer_policy;
  int32_t delivery_policy;
  /* Above 0: a rolling commit with so many replicas away at once. */
  int32_t rolling_max_unavailable;
  /* Of LockstepPolicy.OnStraggler. */
  int32_t on_straggler;
  int32_t allow_no_recovery;
  int32_t verify_source;
  /* Of TransferMedium. */
  int32_t transfer_medium;
} weightsync_publish_options;

typedef struct weightsync_published {
  char version_name[192];
  char update_id[64];
  int64_t version;
  int64_t copied_bytes;
  double copy_duration;
  /* How long the call took. */
  double stall;
} weightsync_published;

typedef struct weightsync_version {
  char version_name[192];
  char update_id[64];
  int64_t version;
  int64_t step;
  /* Of Version.State. */
  int32_t state;
  int32_t bucket_count;
  int64_t total_bytes;
  int64_t wire_bytes;
  int64_t moved_bytes;
  int32_t replica_count;
  /* Of TransferPolicy. */
  int32_t transfer_policy;
  /* Phases; negative: not measured. */
  double gather;
  double snapshot;
  double prepare;
  double transfer;
  double pause;
  double commit;
  double apply;
  double resume;
  double total;
  /* Of its failure; 0 and empty where there is none. */
  int32_t failure_code;
  char failure_reason[64];
  char failure_message[1024];
  /* Replicas that run with it. */
  int32_t serving_count;
  /* Known ones that were not whole when it began: they do not serve it yet, and
   * get it when they come. Their names ("models/{model}/replicas/{replica}")
   * with spaces between them; those that do not fit are left out. */
  int32_t absent_count;
  char absent_replicas[4096];
  /* Who serves it, or what it is: a sentence for people. */
  char summary[1024];
} weightsync_version;

typedef struct weightsync_prepared {
  char layout_id[64];
  int32_t bucket_count;
  int64_t wire_bytes;
  double prepare_duration;
} weightsync_prepared;

weightsync_error* weightsync_trainer_open(
    const weightsync_trainer_options* options, weightsync_trainer** trainer);
/* Memory for tensors; mapped until _free, at the same address. */
weightsync_error* weightsync_trainer_allocate(weightsync_trainer* trainer,
                                              int64_t size_bytes,
                                              double timeout,
                                              weightsync_arena* arena);
/* Memory that the caller owns. NOT_MEMORY: `fd` is of something else. What has
 * no name stays alive until it is forgotten. */
weightsync_error* weightsync_trainer_use_shared_memory(
    weightsync_trainer* trainer, const weightsync_shared_memory* memory);
void weightsync_trainer_forget_shared_memory(weightsync_trainer* trainer,
                                             const void* data);
/* `registered` may be NULL. */
weightsync_error* weightsync_trainer_register(
    weightsync_trainer* trainer, const weightsync_tensor* shards, size_t count,
    double timeout, weightsync_registered* registered);
/* `options` may be NULL. When it returns, the tensors may be changed. */
weightsync_error* weightsync_trainer_publish(
    weightsync_trainer* trainer, const weightsync_publish_options* options,
    weightsync_published* published);
/* Until the update is ACTIVE. `version` may be NULL. */
weightsync_error* weightsync_trainer_wait(weightsync_trainer* trainer,
                                          const weightsync_published* published,
                                          double timeout,
                                          weightsync_version* version);
/* Where it stands now. */
weightsync_error* weightsync_trainer_progress(
    weightsync_trainer* trainer, const weightsync_published* published,
    double timeout, weightsync_version* version);
/* `prepared` may be NULL. */
weightsync_error* weightsync_trainer_prepare(weightsync_trainer* trainer,
                                             double timeout,
                                             weightsync_prepared* prepared);
/* NULL while the lease lives. */
weightsync_error* weightsync_trainer_status(const weightsync_trainer* trainer);
/* "nodes/{node}" of the daemon. */
void weightsync_trainer_node(const weightsync_trainer* trainer, char node[128]);
/* Deregisters; calls that run are cancelled. Arenas stay mapped until _free. */
void weightsync_trainer_close(weightsync_trainer* trainer);
void weightsync_trainer_free(weightsync_trainer* trainer);

/* ---- Workers ---- */

typedef struct weightsync_worker weightsync_worker;

typedef struct weightsync_installed {
  /* Of InstalledState.State. */
  int32_t state;
  char update_id[64];
  int64_t version;
} weightsync_installed;

typedef struct weightsync_applied {
  const char* update_id;
  int64_t version;
  int64_t step;
  int64_t copied_bytes;
  double copy_duration;
  /* 0: the tensors hold the update. */
  int32_t code;
  const char* reason;
  const char* message;
} weightsync_applied;

/* Tensors that can be read now, in `take`: see TensorReader. Valid in that
 * call. */
typedef struct weightsync_reader weightsync_reader;

typedef struct weightsync_take {
  const char* update_id;
  int64_t version;
  int32_t first;
  int32_t last;
  /* Indices into the tensors that were registered. */
  const int32_t* tensors;
  size_t tensor_count;
  weightsync_reader* reader;
} weightsync_take;

/* To `data`, laid out as it was registered. */
weightsync_error* weightsync_reader_read(weightsync_reader* reader,
                                         int32_t tensor, void* data,
                                         int64_t size_bytes);

typedef struct weightsync_worker_options {
  size_t struct_size;
  const char* address;
  const char* model;
  const char* replica;
  const char* incarnation;
  int32_t worker_index;
  /* 0: 1. */
  int32_t worker_count;
  const char* client;
  int32_t copy_threads;
  /* What the tensors hold at the start; NULL: what the engine loaded. */
  const weightsync_installed* installed;
  /* Passed to each callback. */
  void* user;
  /* All may be NULL; see WorkerOptions. */
  void (*may_write)(void* user, weightsync_answer* answer);
  void (*load)(void* user, const char* update_id, int64_t version,
               weightsync_answer* answer);
  void (*swap)(void* user, int32_t set, const char* update_id,
               weightsync_answer* answer);
  void (*on_writing)(void* user, const char* update_id);
  void (*on_applied)(void* user, const weightsync_applied* applied);
  /* 0: 20 s, and 5 s. */
  double register_timeout;
  double max_backoff;
  void (*on_remove)(void* user, weightsync_answer* answer);
  /* With tensors whose `data` is NULL. */
  void (*take)(void* user, const weightsync_take* take,
               weightsync_answer* answer);
} weightsync_worker_options;

/* `spare`: NULL, or a second set of `count` tensors (options->swap). */
weightsync_error* weightsync_worker_start(
    const weightsync_worker_options* options, const weightsync_tensor* tensors,
    const weightsync_tensor* spare, size_t count, weightsync_worker** worker);
weightsync_error* weightsync_worker_wait_registered(weightsync_worker* worker,
                                                    double timeout);
void weightsync_worker_installed(const weightsync_worker* worker,
                                 weightsync_installed* installed);
weightsync_error* weightsync_worker_wait_installed(weightsync_worker* worker,
                                                   int64_t version,
                                                   double timeout);
weightsync_error* weightsync_worker_mark_dropped(weightsync_worker* worker);
weightsync_error* weightsync_worker_sleep(weightsync_worker* worker,
                                          double timeout);
weightsync_error* weightsync_worker_wake(weightsync_worker* worker);
weightsync_error* weightsync_worker_status(const weightsync_worker* worker);
int32_t weightsync_worker_ended(const weightsync_worker* worker);
/* Waits for a copy that runs; the tensors are not touched after it. */
void weightsync_worker_close(weightsync_worker* worker);
void weightsync_worker_free(weightsync_worker* worker);

/* ---- Replicas ---- */

typedef struct weightsync_replica weightsync_replica;

typedef struct weightsync_pause {
  /* Empty: an operator asked for it. */
  const char* update_id;
  int64_t version;
  /* Of PauseMode. */
  int32_t mode;
  /* Seconds until the daemon gives up waiting. */
  double timeout;
} weightsync_pause;

typedef struct weightsync_resume {
  /* Empty: what the workers came with. */
  const char* update_id;
  int64_t version;
  int64_t step;
  int32_t weights_changed;
  /* Of PauseMode. */
  int32_t mode;
  /* The model was removed: go on without it. */
  int32_t removed;
} weightsync_resume;

typedef struct weightsync_replica_options {
  size_t struct_size;
  const char* address;
  const char* model;
  const char* replica;
  const char* incarnation;
  /* 0: 1. */
  int32_t worker_count;
  const char* client;
  int32_t partial;
  int32_t atomic_swap;
  int32_t paused;
  void* user;
  /* Both must be given. */
  void (*on_pause)(void* user, const weightsync_pause* pause,
                   weightsync_answer* answer);
  void (*on_resume)(void* user, const weightsync_resume* resume,
                    weightsync_answer* answer);
  double register_timeout;
  double max_backoff;
  /* The engine can go on without the model. */
  int32_t removable;
} weightsync_replica_options;

weightsync_error* weightsync_replica_start(
    const weightsync_replica_options* options, weightsync_replica** replica);
weightsync_error* weightsync_replica_wait_registered(
    weightsync_replica* replica, double timeout);
int32_t weightsync_replica_paused(const weightsync_replica* replica);
weightsync_error* weightsync_replica_status(const weightsync_replica* replica);
int32_t weightsync_replica_ended(const weightsync_replica* replica);
/* Waits for a hook that runs; not from a hook. */
void weightsync_replica_close(weightsync_replica* replica);
void weightsync_replica_free(weightsync_replica* replica);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // WEIGHTSYNC_CLIENT_CC_C_API_H_
