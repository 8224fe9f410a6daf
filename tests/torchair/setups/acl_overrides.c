/* One device in host memory, behind the ACL runtime calls that torch_npu makes to allocate and copy.
   Signatures are those that torch_npu calls with; the bodies are ours, not CANN's. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle;
static int tokens[4096];
static int next_token;
static handle token(void) { return &tokens[next_token++ & 4095]; }

int aclInit(const char *cfg) { return 0; }
int aclFinalize(void) { return 0; }
int aclrtGetDeviceCount(uint32_t *n) { *n = 1; return 0; }
int aclrtSetDevice(int32_t d) { return 0; }
int aclrtResetDevice(int32_t d) { return 0; }
int aclrtGetDevice(int32_t *d) { *d = 0; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return ""; }
int aclrtGetMemInfo(int a, size_t *f, size_t *t) { *f = (size_t)8 << 30; *t = (size_t)16 << 30; return 0; }

static int alloc(handle *p, size_t n) { return posix_memalign(p, 512, n ? n : 512) ? 100000 : 0; }
int aclrtMalloc(handle *p, size_t n, int policy) { return alloc(p, n); }
int aclrtMallocAlign32(handle *p, size_t n, int policy) { return alloc(p, n); }
int aclrtFree(handle p) { free(p); return 0; }
int aclrtMallocHost(handle *p, size_t n) { return alloc(p, n); }
int aclrtFreeHost(handle p) { free(p); return 0; }
int aclrtMemcpy(handle d, size_t m, const handle s, size_t n, int k) { memmove(d, s, n); return 0; }
int aclrtMemcpyAsync(handle d, size_t m, const handle s, size_t n, int k, handle st) { memmove(d, s, n); return 0; }
int aclrtMemset(handle d, size_t m, int v, size_t n) { memset(d, v, n); return 0; }
int aclrtMemsetAsync(handle d, size_t m, int v, size_t n, handle st) { memset(d, v, n); return 0; }
int aclrtCreateStream(handle *s) { *s = token(); return 0; }
int aclrtCreateStreamWithConfig(handle *s, uint32_t pr, uint32_t f) { *s = token(); return 0; }
int aclrtDestroyStream(handle s) { return 0; }
int aclrtStreamGetId(handle s, int32_t *id) { *id = 0; return 0; }
int aclrtStreamQuery(handle s, int *st) { *st = 0; return 0; }
int aclrtCreateEventWithFlag(handle *e, uint32_t f) { *e = token(); return 0; }
int aclrtCreateEventExWithFlag(handle *e, uint32_t f) { *e = token(); return 0; }
int aclrtQueryEventStatus(handle e, int *st) { *st = 1; return 0; }
int aclrtQueryEventWaitStatus(handle e, int *st) { *st = 0; return 0; }
int aclrtEventElapsedTime(float *ms, handle a, handle b) { *ms = 0; return 0; }
int aclrtGetCurrentContext(handle *c) { *c = token(); return 0; }
int aclrtSetDeviceSatMode(int m) { return 0; }
int aclrtSetOpExecuteTimeOut(uint32_t t) { return 0; }
int aclrtSetOpExecuteTimeOutV2(uint64_t t, uint64_t *a) { *a = t; return 0; }
int aclrtSetOpWaitTimeout(uint32_t t) { return 0; }
int aclrtGetStreamOverflowSwitch(handle s, uint32_t *f) { *f = 0; return 0; }
int aclrtSetStreamOverflowSwitch(handle s, uint32_t f) { return 0; }
int aclrtSetStreamFailureMode(handle s, uint64_t m) { return 0; }
int aclrtGetPrimaryCtxState(int32_t d, uint32_t *f, int32_t *a) { *f = 0; *a = 1; return 0; }
int aclrtPeekAtLastError(int l) { return 0; }
int aclrtGetLastError(int l) { return 0; }
int aclrtDeviceCanAccessPeer(int32_t *c, int32_t a, int32_t b) { *c = 0; return 0; }
int aclrtGetDeviceInfo(uint32_t d, int a, int64_t *v) { *v = 24; return 0; }
int aclrtGetDeviceResLimit(int32_t d, int t, uint32_t *v) { *v = 24; return 0; }
int aclrtGetStreamResLimit(handle s, int t, uint32_t *v) { *v = 24; return 0; }
int aclrtDeviceGetBareTgid(int32_t *p) { *p = 1; return 0; }
size_t aclGetCompileoptSize(int o) { return 2; }
int aclGetCompileopt(int o, char *v, size_t n) { if (n) { v[0] = '0'; } if (n > 1) { v[1] = 0; } return 0; }
int aclrtSynchronizeStreamWithTimeout(handle s, int32_t t) { return 0; }
int aclrtSynchronizeDeviceWithTimeout(int32_t t) { return 0; }
