// The management library for the stand-in's cards: it loads, but reports nothing about them.
extern "C" {
enum { SUCCESS = 0, NOT_SUPPORTED = 3 };
int nvmlInit_v2() { return SUCCESS; }
int nvmlInitWithFlags(unsigned) { return SUCCESS; }
int nvmlShutdown() { return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = 13000;
    return SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
    *device = (void*)bus;
    return SUCCESS;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
    *count = 0;
    return SUCCESS;
}
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return SUCCESS; }  // no fabric
int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = 0;
    return SUCCESS;
}
const char* nvmlErrorString(int) { return "not supported by the stand-in"; }
}
