/* The text of kernels.ptx, which the driver translates for its GPU: a part of the core, as a string. */
#include "device/packer.h"

__asm__(".pushsection .rodata\n"
        ".global hr_kernels_text\n"
        ".hidden hr_kernels_text\n"
        "hr_kernels_text:\n"
        ".incbin \"device/kernels.ptx\"\n"
        ".byte 0\n"
        ".popsection\n");
