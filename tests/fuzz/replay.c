/*
 * Feeds files to a fuzz target: replay FILE... Each input lies in a heap block of exactly its size, for a sanitizer to
 * see a read past it. Prints the number of files; exits 1 where one cannot be read or none was given.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        perror(path);
        return 1;
    }
    const long size = ftell(file);
    /* a block of 0 bytes is one too: nothing of it may be read */
    uint8_t *data = size < 0 ? NULL : malloc((size_t)size);
    if (data == NULL || fseek(file, 0, SEEK_SET) != 0 || fread(data, 1, (size_t)size, file) != (size_t)size) {
        perror(path);
        return 1;
    }
    (void)fclose(file);
    fprintf(stderr, "%s\n", path); /* the last line before a crash names the input */
    (void)LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
    return 0;
}

int main(int argc, char **argv) {
    int status = argc < 2;
    for (int i = 1; i < argc; i++) {
        status |= replay(argv[i]);
    }
    printf("%d files\n", argc - 1);
    return status;
}
