/* The text of pack.ptx, which the driver translates for its GPU: a part of the core, as a string. */
#include "device/packer.h"

__asm__(".pushsection .rodata\n"
        ".global hr_pack_text\n"
        ".hidden hr_pack_text\n"
        "hr_pack_text:\n"
        ".incbin \"device/pack.ptx\"\n"
        ".byte 0\n"
        ".popsection\n");
