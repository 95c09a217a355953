/*
 * A shared library that is found at run time: horo is built with neither its headers nor the library. The functions
 * that are called of it go into a table of pointers, so that nothing else depends on where it has come from.
 */
#ifndef HR_DEVICE_LIBRARY_H
#define HR_DEVICE_LIBRARY_H

#include <stddef.h>

#include "base/status.h"
#include "horo_gpu.h"

/* A function, and the offset of its pointer in the table. */
struct hr_symbol {
    const char *name;
    size_t offset;
};

struct hr_library_kind {
    const char *what;   /* "NCCL", for messages */
    const char *soname; /* under this name it may be in the process already */
    const struct hr_symbol *symbols; /* all that a table needs */
    size_t symbol_count;
    /* Its version by its own numbering, asked through a table that is full; else a status with a sentence. */
    int (*version_of)(const void *table, int *version, struct hr_error *error);
    int least_version;
    /* Writes such a version as people do: 22304 is "2.23.4". */
    void (*write_version)(int version, char *text, size_t text_bytes);
};

/*
 * Takes the first of `paths` that can be used, fills in the table and *found; the library stays loaded until the
 * process ends. An empty path is the library that the process has loaded already, by whatever path; one without a
 * slash is looked for by the loader of the system. The table is written also where this fails. Blocks for as long as
 * loading takes. HORO_OK, or HORO_ERR_RESOURCE with a sentence that says of every place why it is of no use. Any
 * thread.
 */
hr_status hr_library_load(const struct hr_library_kind *kind, const char *const *paths, size_t path_count, void *table,
                          horo_library *found, struct hr_error *error);

#endif
