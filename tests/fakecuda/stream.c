/* Streams, each with a thread of its own, events, and graphs of what a stream was given. */
#define _GNU_SOURCE
#include "state.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum work { COPY_IN, COPY_OUT, COPY, FILL, MARK, CALL, RUN_GRAPH, FAIL };

typedef struct operation {
  enum work work;
  char *target;
  const char *source;
  size_t num_bytes;
  unsigned char byte;
  CUevent event; /* and which of its recordings */
  long number;
  CUhostFn function;
  void *data;
  CUgraphExec graph;
  CUresult code;
  struct operation *next;
} operation;

struct CUgraph_st {
  operation *first, *last;
};

struct CUgraphExec_st {
  operation *first;
  long num_uses; /* 1 for its owner, 1 for each launch that is queued */
};

struct CUstream_st {
  operation *first, *last;
  long num_put, num_done, num_awaited;
  bool closed, abandoned;
  CUgraph captured; /* while it is captured */
  bool valid;
  pthread_t owner; /* the thread that captures it */
  struct CUstream_st *next;
};

struct CUevent_st {
  CUstream stream; /* where it was last recorded, */
  long number;     /* and as which operation there */
  long num_recorded, num_reached;
  bool captured, closed;
  long num_pending;
};

static CUstream streams; /* those that are not destroyed */
static long num_threads; /* of streams that have not ended, destroyed or not */
static bool lazy;

/* For tests: streams run nothing before something waits for it, so that whatever the host does too early
   shows every time. */
void fakecuda_set_lazy(int is_lazy);

void fakecuda_set_lazy(int is_lazy) { lazy = is_lazy; }

static bool is_live(CUstream stream) {
  for (CUstream s = streams; s; s = s->next)
    if (s == stream) return true;
  return false;
}

bool invalidate_capture(void) {
  bool captures = false;
  for (CUstream s = streams; s; s = s->next)
    if (s->captured && pthread_equal(s->owner, pthread_self())) {
      s->valid = false;
      captures = true;
    }
  return captures;
}

void drop_streams(void) {
  for (CUstream s = streams; s; s = s->next) s->closed = s->abandoned = true;
  streams = NULL;
  pthread_cond_broadcast(&changed);
  while (num_threads) pthread_cond_wait(&changed, &lock);
}

static void free_list(operation *first) {
  while (first) {
    operation *next = first->next;
    free(first);
    first = next;
  }
}

static void release_graph(CUgraphExec graph) {
  if (--graph->num_uses == 0) {
    free_list(graph->first);
    free(graph);
  }
}

static void release_event(CUevent event) {
  if (event->closed && event->num_pending == 0) free(event);
}

/* Whether all the bytes of a copy or fill are allocated. With the lock. */
static bool is_there(const operation *op) {
  enum kind to = op->work == COPY_OUT ? HOST_MEMORY : DEVICE_MEMORY;
  enum kind from = op->work == COPY_IN ? HOST_MEMORY : DEVICE_MEMORY;
  return holds(to, op->target, op->num_bytes) && (op->work == FILL || holds(from, op->source, op->num_bytes));
}

/* Copy or fill without the lock. */
static void move(const operation *op) {
  if (!is_there(op)) {
    lose(CUDA_ERROR_ILLEGAL_ADDRESS);
    return;
  }
  pthread_mutex_unlock(&lock);
  if (op->work == FILL)
    memset(op->target, op->byte, op->num_bytes);
  else
    memcpy(op->target, op->source, op->num_bytes);
  pthread_mutex_lock(&lock);
}

static void run(const operation *op) {
  switch (op->work) {
    case COPY_IN:
    case COPY_OUT:
    case COPY:
    case FILL:
      if (!lost()) move(op);
      break;
    case MARK:
      if (op->event->num_reached < op->number) op->event->num_reached = op->number;
      op->event->num_pending--;
      release_event(op->event);
      break;
    case CALL:
      if (!lost()) {
        pthread_mutex_unlock(&lock);
        op->function(op->data);
        pthread_mutex_lock(&lock);
      }
      break;
    case RUN_GRAPH:
      for (operation *node = op->graph->first; node; node = node->next) run(node);
      release_graph(op->graph);
      break;
    case FAIL:
      lose(op->code);
      break;
  }
}

static bool is_due(CUstream stream) {
  if (stream->closed) return true;
  return stream->first && (!lazy || stream->num_done < stream->num_awaited);
}

static void await_operation(CUstream stream, long number) {
  if (stream->num_awaited < number) stream->num_awaited = number;
  pthread_cond_broadcast(&changed);
}

static void *work(void *argument) {
  CUstream stream = argument;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!is_due(stream)) pthread_cond_wait(&changed, &lock);
    operation *op = stream->first;
    if (op == NULL) break;
    stream->first = op->next;
    if (stream->first == NULL) stream->last = NULL;
    if (!stream->abandoned) run(op);
    free(op);
    stream->num_done++;
    pthread_cond_broadcast(&changed);
  }
  num_threads--;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  free(stream);
  return NULL;
}

/* Queue or capture an operation. With the lock. */
static void append(CUstream stream, operation op) {
  operation *made = malloc(sizeof *made);
  *made = op;
  made->next = NULL;
  operation **first = &stream->first, **last = &stream->last;
  if (stream->captured) {
    first = &stream->captured->first;
    last = &stream->captured->last;
  } else {
    stream->num_put++;
  }
  if (*last)
    (*last)->next = made;
  else
    *first = made;
  *last = made;
  pthread_cond_broadcast(&changed);
}

/* Queue or capture an operation that fails when it runs if there is a code to fail with. With the lock, which
   is free afterwards. */
static CUresult put(CUstream stream, operation op, CUresult later) {
  if (later) append(stream, (operation){.work = FAIL, .code = later});
  append(stream, op);
  return leave(CUDA_SUCCESS);
}

/* Refuse a stream that takes no work from this thread. With the lock; the reason, or success. */
static CUresult check(CUstream stream) {
  if (!is_live(stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->captured == NULL) return CUDA_SUCCESS;
  if (!pthread_equal(stream->owner, pthread_self())) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  return stream->valid ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

static CUresult transfer(operation op, CUstream stream, CUresult later) {
  CUresult refused = check(stream);
  if (refused) return leave(refused);
  bool overlap = op.work == COPY && op.target < op.source + op.num_bytes && op.source < op.target + op.num_bytes;
  return is_there(&op) && !overlap ? put(stream, op, later) : leave(CUDA_ERROR_INVALID_VALUE);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t num_bytes, CUstream stream) {
  CUresult later;
  ENTER(&later);
  operation op = {.work = COPY_IN, .target = (char *)(uintptr_t)target, .source = source, .num_bytes = num_bytes};
  return transfer(op, stream, later);
}

CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t num_bytes, CUstream stream) {
  CUresult later;
  ENTER(&later);
  operation op = {.work = COPY_OUT, .target = target, .source = (char *)(uintptr_t)source, .num_bytes = num_bytes};
  return transfer(op, stream, later);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t num_bytes, CUstream stream) {
  CUresult later;
  ENTER(&later);
  operation op = {.work = COPY,
                  .target = (char *)(uintptr_t)target,
                  .source = (char *)(uintptr_t)source,
                  .num_bytes = num_bytes};
  return transfer(op, stream, later);
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char byte, size_t num_bytes, CUstream stream) {
  CUresult later;
  ENTER(&later);
  operation op = {.work = FILL, .target = (char *)(uintptr_t)target, .num_bytes = num_bytes, .byte = byte};
  return transfer(op, stream, later);
}

/* What stands in for kernels. */
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
  CUresult later;
  ENTER(&later);
  CUresult refused = check(stream);
  if (refused) return leave(refused);
  return put(stream, (operation){.work = CALL, .function = function, .data = data}, later);
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
  ENTER(NULL);
  if (flags > CU_STREAM_NON_BLOCKING) return leave(CUDA_ERROR_INVALID_VALUE);
  CUstream made = calloc(1, sizeof *made);
  pthread_t thread;
  if (made == NULL || pthread_create(&thread, NULL, work, made)) {
    free(made);
    return leave(CUDA_ERROR_OUT_OF_MEMORY);
  }
  pthread_detach(thread);
  num_threads++;
  made->next = streams;
  streams = made;
  num_live[STREAM]++;
  *stream = made;
  return leave(CUDA_SUCCESS);
}

CUresult cuStreamDestroy(CUstream stream) {
  ENTER_FREE();
  if (!is_live(stream)) return leave(CUDA_ERROR_INVALID_HANDLE);
  CUstream *link = &streams;
  while (*link != stream) link = &(*link)->next;
  *link = stream->next;
  num_live[STREAM]--;
  stream->closed = true;
  pthread_cond_broadcast(&changed);
  return leave(lost());
}

/* On a lost device nothing more is begun, but what runs is waited for: it uses memory that is freed next. */
CUresult cuStreamSynchronize(CUstream stream) {
  CUresult refused = enter(__func__, NULL);
  if (refused && !stays(refused)) return refused;
  if (refused) pthread_mutex_lock(&lock);
  if (!is_live(stream)) return leave(CUDA_ERROR_INVALID_HANDLE);
  if (invalidate_capture()) return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  long number = stream->num_put;
  await_operation(stream, number);
  while (stream->num_done < number) pthread_cond_wait(&changed, &lock);
  return leave(lost());
}

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
  ENTER(NULL);
  if (flags > (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) return leave(CUDA_ERROR_INVALID_VALUE);
  *event = calloc(1, sizeof **event);
  num_live[EVENT]++;
  return leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy(CUevent event) {
  ENTER_FREE();
  num_live[EVENT]--;
  event->closed = true;
  release_event(event);
  return leave(lost());
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  CUresult later;
  ENTER(&later);
  CUresult refused = check(stream);
  if (refused) return leave(refused);
  event->captured = stream->captured != NULL;
  if (event->captured) return leave(CUDA_SUCCESS); /* A dependency of what follows, and no node. */
  event->num_pending++;
  event->stream = stream;
  event->number = stream->num_put + 1 + (later != CUDA_SUCCESS);
  return put(stream, (operation){.work = MARK, .event = event, .number = ++event->num_recorded}, later);
}

CUresult cuEventSynchronize(CUevent event) {
  ENTER(NULL);
  if (event->captured) return leave(CUDA_ERROR_CAPTURED_EVENT);
  if (invalidate_capture()) return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  if (is_live(event->stream)) await_operation(event->stream, event->number);
  long number = event->num_recorded;
  while (event->num_reached < number) pthread_cond_wait(&changed, &lock);
  return leave(lost());
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  ENTER(NULL);
  if (!is_live(stream)) return leave(CUDA_ERROR_INVALID_HANDLE);
  if (mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) return leave(CUDA_ERROR_INVALID_VALUE);
  if (stream->captured) return leave(CUDA_ERROR_ILLEGAL_STATE);
  stream->captured = calloc(1, sizeof *stream->captured);
  stream->valid = true;
  stream->owner = pthread_self();
  num_live[GRAPH]++;
  return leave(CUDA_SUCCESS);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  ENTER(NULL);
  if (!is_live(stream)) return leave(CUDA_ERROR_INVALID_HANDLE);
  *status = stream->captured == NULL ? CU_STREAM_CAPTURE_STATUS_NONE
            : stream->valid          ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                     : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  return leave(CUDA_SUCCESS);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  *graph = NULL;
  ENTER(NULL);
  if (!is_live(stream)) return leave(CUDA_ERROR_INVALID_HANDLE);
  if (stream->captured == NULL) return leave(CUDA_ERROR_ILLEGAL_STATE);
  if (!pthread_equal(stream->owner, pthread_self())) return leave(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  CUgraph captured = stream->captured;
  stream->captured = NULL;
  if (!stream->valid) {
    free_list(captured->first);
    free(captured);
    num_live[GRAPH]--;
    return leave(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  *graph = captured;
  return leave(CUDA_SUCCESS);
}

CUresult cuGraphInstantiate(CUgraphExec *launchable, CUgraph graph, unsigned long long flags) {
  ENTER(NULL);
  if (flags != 0) return leave(CUDA_ERROR_INVALID_VALUE);
  CUgraphExec made = calloc(1, sizeof *made);
  made->num_uses = 1;
  operation **end = &made->first;
  for (operation *node = graph->first; node; node = node->next) {
    *end = malloc(sizeof **end);
    **end = *node;
    (*end)->next = NULL;
    end = &(*end)->next;
  }
  num_live[GRAPH_EXEC]++;
  *launchable = made;
  return leave(CUDA_SUCCESS);
}

CUresult cuGraphDestroy(CUgraph graph) {
  ENTER_FREE();
  free_list(graph->first);
  free(graph);
  num_live[GRAPH]--;
  return leave(lost());
}

CUresult cuGraphLaunch(CUgraphExec launchable, CUstream stream) {
  CUresult later;
  ENTER(&later);
  CUresult refused = check(stream);
  if (refused) return leave(refused);
  launchable->num_uses++;
  return put(stream, (operation){.work = RUN_GRAPH, .graph = launchable}, later);
}

CUresult cuGraphExecDestroy(CUgraphExec launchable) {
  ENTER_FREE();
  num_live[GRAPH_EXEC]--;
  release_graph(launchable);
  return leave(lost());
}
