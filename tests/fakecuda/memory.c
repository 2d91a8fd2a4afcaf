/* Device memory, which is host memory full of garbage, and pinned memory. */
#define _GNU_SOURCE
#include "state.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 512, FRESH = 0xCD, FREED = 0xDD };

typedef struct allocation {
  enum kind kind;
  char *begin;
  size_t num_bytes;
  struct allocation *next;
} allocation;

static allocation *allocations, *dead;
static size_t used, total_bytes = (size_t)1 << 30;

/* For tests: how much device memory there is. */
void fakecuda_set_total_bytes(size_t num_bytes);

void fakecuda_set_total_bytes(size_t num_bytes) { total_bytes = num_bytes; }

static size_t rounded(size_t num_bytes) { return (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

bool holds(enum kind kind, const void *begin, size_t num_bytes) {
  const char *address = begin;
  for (allocation *a = allocations; a; a = a->next)
    if (a->kind == kind && a->begin <= address && address + num_bytes <= a->begin + a->num_bytes) return true;
  return false;
}

/* With the lock, which is free afterwards. */
static CUresult take(enum kind kind, size_t num_bytes, int byte, void **begin) {
  if (invalidate_capture()) return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  if (num_bytes == 0) return leave(CUDA_ERROR_INVALID_VALUE);
  if (kind == DEVICE_MEMORY && rounded(num_bytes) > total_bytes - used) return leave(CUDA_ERROR_OUT_OF_MEMORY);
  allocation *made = malloc(sizeof *made);
  char *memory = aligned_alloc(ALIGNMENT, rounded(num_bytes));
  if (made == NULL || memory == NULL) {
    free(made);
    free(memory);
    return leave(CUDA_ERROR_OUT_OF_MEMORY);
  }
  memset(memory, byte, num_bytes);
  *made = (allocation){kind, memory, num_bytes, allocations};
  allocations = made;
  num_live[kind]++;
  if (kind == DEVICE_MEMORY) used += rounded(num_bytes);
  *begin = memory;
  return leave(CUDA_SUCCESS);
}

static CUresult give_back(enum kind kind, const void *begin) {
  for (allocation **link = &allocations; *link; link = &(*link)->next) {
    allocation *a = *link;
    if (a->kind != kind || a->begin != begin) continue;
    *link = a->next;
    num_live[kind]--;
    if (kind == DEVICE_MEMORY) used -= rounded(a->num_bytes);
    if (lost()) { /* What runs may still use it, for nothing waits for a lost device. */
      a->next = dead;
      dead = a;
      return leave(lost());
    }
    memset(a->begin, FREED, a->num_bytes);
    free(a->begin);
    free(a);
    return leave(CUDA_SUCCESS);
  }
  return leave(CUDA_ERROR_INVALID_VALUE);
}

static void drop(allocation **list) {
  while (*list) {
    allocation *a = *list;
    *list = a->next;
    free(a->begin);
    free(a);
  }
}

void drop_memory(void) {
  drop(&allocations);
  drop(&dead);
  used = 0;
}

/* For tests: what cudaFree does, which makes the primary context current by itself. Of what a lost device's
   rig had, nothing is left to free. */
void fakecuda_free(const void *begin);

void fakecuda_free(const void *begin) {
  pthread_mutex_lock(&lock);
  give_back(DEVICE_MEMORY, begin); /* frees the lock */
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *all_bytes) {
  ENTER(NULL);
  *all_bytes = total_bytes;
  *free_bytes = total_bytes - used;
  return leave(CUDA_SUCCESS);
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t num_bytes) {
  ENTER(NULL);
  void *begin = NULL;
  CUresult result = take(DEVICE_MEMORY, num_bytes, FRESH, &begin);
  *address = (CUdeviceptr)(uintptr_t)begin;
  return result;
}

CUresult cuMemFree(CUdeviceptr address) {
  ENTER_FREE();
  return give_back(DEVICE_MEMORY, (void *)(uintptr_t)address);
}

CUresult cuMemHostAlloc(void **begin, size_t num_bytes, unsigned int flags) {
  (void)flags;
  ENTER(NULL);
  return take(HOST_MEMORY, num_bytes, FRESH, begin);
}

CUresult cuMemFreeHost(void *begin) {
  ENTER_FREE();
  return give_back(HOST_MEMORY, begin);
}
