/* The driver's functions that vLLM's CUDA extensions link to; each returns CUDA_ERROR_NO_DEVICE. With it as
   libcuda.so.1, vLLM for CUDA can be imported on a machine without a driver (scripts/gpuset.sh). */
#define NO_DEVICE 100
int cuCtxGetCurrent(void) { return NO_DEVICE; }
int cuCtxSetCurrent(void) { return NO_DEVICE; }
int cuDeviceGetAttribute(void) { return NO_DEVICE; }
int cuDevicePrimaryCtxRetain(void) { return NO_DEVICE; }
int cuGetErrorString(void) { return NO_DEVICE; }
int cuGetProcAddress_v2(void) { return NO_DEVICE; }
int cuMemAddressFree(void) { return NO_DEVICE; }
int cuMemAddressReserve(void) { return NO_DEVICE; }
int cuMemCreate(void) { return NO_DEVICE; }
int cuMemGetAllocationGranularity(void) { return NO_DEVICE; }
int cuMemMap(void) { return NO_DEVICE; }
int cuMemRelease(void) { return NO_DEVICE; }
int cuMemSetAccess(void) { return NO_DEVICE; }
int cuMemUnmap(void) { return NO_DEVICE; }
int cuPointerGetAttribute(void) { return NO_DEVICE; }
int cuTensorMapEncodeTiled(void) { return NO_DEVICE; }
