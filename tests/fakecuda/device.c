/* Devices, contexts, errors and failures to come. */
#define _GNU_SOURCE
#include "state.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
long num_live[NUM_KINDS];

struct CUctx_st {
  int device;
  long retained;
};

enum { NUM_DEVICES = 2, STACK = 16, NUM_FAULTS = 16, NUM_COUNTS = 64 };

static struct CUctx_st primary[NUM_DEVICES] = {{0, 0}, {1, 0}};
static bool initialized;
static CUresult lost_code;
static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;
static struct {
  char call[64];
  long countdown;
  CUresult code;
} faults[NUM_FAULTS];
static struct {
  const char *call;
  long count;
} counts[NUM_COUNTS];

static const struct {
  CUresult code;
  const char *name, *words;
  bool stays;
} codes[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error", false},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument", false},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory", false},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error", false},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected", false},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal", false},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context", false},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered", true},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle", false},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found", false},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered", true},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed", false},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure", true},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported", false},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing", false},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture", false},
    {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread", false},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state", false},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream", false},
};
enum { NUM_CODES = sizeof codes / sizeof *codes };

static int find_code(CUresult code) {
  for (int i = 0; i < NUM_CODES; i++)
    if (codes[i].code == code) return i;
  return -1;
}

bool stays(CUresult code) {
  int i = find_code(code);
  return i >= 0 && codes[i].stays;
}

void lose(CUresult code) {
  if (lost_code == CUDA_SUCCESS) lost_code = code;
  pthread_cond_broadcast(&changed);
}

CUresult lost(void) { return lost_code; }

/* A call's name without the suffix that cuda.h gives it, such as _v2. */
static bool same_call(const char *symbol, const char *name) {
  size_t length = strlen(name);
  return strncmp(symbol, name, length) == 0 && (symbol[length] == 0 || strncmp(symbol + length, "_v", 2) == 0);
}

static CUresult take_fault(const char *call) {
  CUresult code = CUDA_SUCCESS;
  for (int i = 0; i < NUM_FAULTS; i++)
    if (faults[i].countdown > 0 && same_call(call, faults[i].call) && --faults[i].countdown == 0)
      code = faults[i].code;
  return code;
}

CUresult leave(CUresult result) {
  pthread_mutex_unlock(&lock);
  return result;
}

static void count_call(const char *call) {
  int i = 0;
  while (i < NUM_COUNTS - 1 && counts[i].call && counts[i].call != call) i++;
  counts[i].call = call;
  counts[i].count++;
}

/* Take the lock, and check that there is a context; without one it is free again. */
static CUresult begin(const char *call) {
  pthread_mutex_lock(&lock);
  count_call(call);
  if (!initialized) return leave(CUDA_ERROR_NOT_INITIALIZED);
  if (depth == 0) return leave(CUDA_ERROR_INVALID_CONTEXT);
  return stack[depth - 1]->retained == 0 ? leave(CUDA_ERROR_CONTEXT_IS_DESTROYED) : CUDA_SUCCESS;
}

CUresult enter_free(const char *call) { return begin(call); }

CUresult enter(const char *call, CUresult *later) {
  CUresult refused = begin(call);
  if (refused) return refused;
  CUresult fault = take_fault(call);
  if (later) *later = CUDA_SUCCESS;
  if (later && (fault == CUDA_ERROR_LAUNCH_FAILED || fault == CUDA_ERROR_ILLEGAL_ADDRESS))
    *later = fault;
  else if (stays(fault))
    lose(fault);
  if (lost_code != CUDA_SUCCESS) return leave(lost_code);
  return fault == CUDA_SUCCESS || (later && *later) ? CUDA_SUCCESS : leave(fault);
}

/* For tests: the nth call from now of that name returns the code; every call returns the code; how many of a
   kind live; how often a call was made; whether a live allocation holds the bytes; and what only a new process can do with CUDA: begin
   anew after an error that stays. */
void fakecuda_fail(const char *call, long nth, int code);
void fakecuda_lose(int code);
long fakecuda_live(int kind);
long fakecuda_num_calls(const char *call);
int fakecuda_holds(int kind, const void *begin, size_t num_bytes);
void fakecuda_begin_anew(void);

void fakecuda_fail(const char *call, long nth, int code) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < NUM_FAULTS; i++)
    if (faults[i].countdown == 0) {
      snprintf(faults[i].call, sizeof faults[i].call, "%s", call);
      faults[i].countdown = nth;
      faults[i].code = (CUresult)code;
      break;
    }
  pthread_mutex_unlock(&lock);
}

void fakecuda_lose(int code) {
  pthread_mutex_lock(&lock);
  lose((CUresult)code);
  pthread_mutex_unlock(&lock);
}

long fakecuda_live(int kind) {
  pthread_mutex_lock(&lock);
  long count = num_live[kind];
  pthread_mutex_unlock(&lock);
  return count;
}

long fakecuda_num_calls(const char *call) {
  pthread_mutex_lock(&lock);
  long count = 0;
  for (int i = 0; i < NUM_COUNTS && counts[i].call; i++)
    if (same_call(counts[i].call, call)) count += counts[i].count;
  pthread_mutex_unlock(&lock);
  return count;
}

int fakecuda_holds(int kind, const void *begin, size_t num_bytes) {
  pthread_mutex_lock(&lock);
  bool there = holds((enum kind)kind, begin, num_bytes);
  pthread_mutex_unlock(&lock);
  return there;
}

void fakecuda_begin_anew(void) {
  pthread_mutex_lock(&lock);
  drop_streams();
  drop_memory();
  lost_code = CUDA_SUCCESS;
  memset(faults, 0, sizeof faults);
  memset(counts, 0, sizeof counts);
  memset(num_live, 0, sizeof num_live);
  pthread_mutex_unlock(&lock);
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  int i = find_code(error);
  *text = i < 0 ? NULL : codes[i].words;
  return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
  int i = find_code(error);
  *text = i < 0 ? NULL : codes[i].name;
  return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (getenv("FAKECUDA_NO_DEVICE")) return CUDA_ERROR_NO_DEVICE;
  initialized = true;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  *count = NUM_DEVICES;
  return initialized ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < NUM_DEVICES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  (void)device;
  snprintf(name, (size_t)length, "Stand-in GPU");
  return CUDA_SUCCESS;
}

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
  (void)device;
  *major = 8;
  *minor = 9;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  pthread_mutex_lock(&lock);
  primary[device].retained++;
  num_live[PRIMARY]++;
  *context = &primary[device];
  return leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  pthread_mutex_lock(&lock);
  if (primary[device].retained == 0) return leave(CUDA_ERROR_INVALID_CONTEXT);
  primary[device].retained--;
  num_live[PRIMARY]--;
  return leave(CUDA_SUCCESS);
}

CUresult cuCtxPushCurrent(CUcontext context) {
  if (context == NULL || depth == STACK) return CUDA_ERROR_INVALID_VALUE;
  stack[depth++] = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
  if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack[--depth];
  return CUDA_SUCCESS;
}

/* How cuda-bindings finds its functions. Of those with several versions the newest is defined here. */
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
  (void)version, (void)flags;
  char versioned[128];
  snprintf(versioned, sizeof versioned, "%s_v2", symbol);
  *function = dlsym(RTLD_DEFAULT, versioned);
  if (*function == NULL) *function = dlsym(RTLD_DEFAULT, symbol);
  if (status)
    *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
