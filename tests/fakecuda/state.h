/* A libcuda.so.1 on host memory, with CUDA's rules, for running real PyCUDA and cuda-bindings without a GPU.

   Compiled against the toolkit's own cuda.h, so that every signature is CUDA's. What is defined here: contexts,
   memory, streams, events, copies, host functions, capture and graphs; everything else that PyCUDA links
   to is generated as a function that returns CUDA_ERROR_NOT_SUPPORTED. One lock and one condition serve all.

   Stricter than CUDA, since the project never does it: the default stream and host memory that is not pinned
   are refused. */
#ifndef FAKECUDA_STATE_H
#define FAKECUDA_STATE_H

#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

enum kind { DEVICE_MEMORY, HOST_MEMORY, STREAM, EVENT, GRAPH, GRAPH_EXEC, PRIMARY, NUM_KINDS };

extern pthread_mutex_t lock;
extern pthread_cond_t changed;
extern long num_live[NUM_KINDS];

/* Begin a call: take the lock, count it, and check context, errors that stay and the failures asked for.
   On anything but CUDA_SUCCESS the lock is free again. With `later`, an error of the kind that running work
   has is put there instead, for the queued work to have. */
CUresult enter(const char *call, CUresult *later);
#define ENTER(later)                          \
  do {                                        \
    CUresult refused = enter(__func__, later); \
    if (refused) return refused;              \
  } while (0)
/* Begin a call that frees: it does so on a lost device, too, and then returns what all calls return. */
CUresult enter_free(const char *call);
#define ENTER_FREE()                         \
  do {                                       \
    CUresult refused = enter_free(__func__); \
    if (refused) return refused;             \
  } while (0)
/* End a call: free the lock. */
CUresult leave(CUresult result);
/* Make a code the one that every later call returns, if it is the first. With the lock. */
void lose(CUresult code);
CUresult lost(void);
bool stays(CUresult code);
/* The calling thread captures a stream: end that capture's worth, as CUDA does. With the lock. */
bool invalidate_capture(void);
/* The bytes are in one live allocation of that kind. With the lock. */
bool holds(enum kind kind, const void *begin, size_t num_bytes);
/* End all streams without running what is queued, when what runs has run; and free all memory. With the lock. */
void drop_streams(void);
void drop_memory(void);

#endif
