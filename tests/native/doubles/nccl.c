/*
 * A double of NCCL. Compiled for each test with what it is to do:
 *   VERSION       what ncclGetVersion says; 22304 where it is not given
 *   VERSION_CODE  what ncclGetVersion returns
 */
#ifndef VERSION
#define VERSION 22304
#endif
#ifndef VERSION_CODE
#define VERSION_CODE 0
#endif

int ncclGetVersion(int *version) {
    *version = VERSION;
    return VERSION_CODE;
}

const char *ncclGetErrorString(int code) {
    return code == 2 ? "unhandled system error" : "no text";
}
