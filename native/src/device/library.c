#include "device/library.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

/* The reasons why each place is of no use, one behind the other; cut where the text is full. */
struct reasons {
    char text[HORO_MESSAGE_MAX];
    size_t length;
};

static void add_reason(struct reasons *reasons, const char *reason) {
    const size_t room = sizeof reasons->text - reasons->length;
    const int written =
        snprintf(reasons->text + reasons->length, room, "%s%s", reasons->length == 0 ? "" : "; ", reason);
    const int fits = written >= 0 && (size_t)written < room;
    reasons->length = fits ? reasons->length + (size_t)written : sizeof reasons->text - 1;
}

static hr_status check(const struct hr_library_kind *kind, void *library, const char *name, void *table,
                       horo_library *found, struct hr_error *error) {
    struct link_map *map = NULL;
    const char *path = dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0' ? map->l_name : name;
    char version_text[24];
    char least_text[24];
    int version = 0;
    for (size_t i = 0; i < kind->symbol_count; i++) {
        void *address = dlsym(library, kind->symbols[i].name);
        if (address == NULL) {
            return hr_fail(error, HORO_ERR_RESOURCE, "%s lacks %s", path, kind->symbols[i].name);
        }
        /* a pointer to data and one to a function have the same form where there is dlsym */
        memcpy((char *)table + kind->symbols[i].offset, &address, sizeof address);
    }
    struct hr_error refusal = {0};
    if (kind->version_of(table, &version, &refusal) != HORO_OK) {
        return hr_fail(error, HORO_ERR_RESOURCE, "%s %s", path, refusal.text);
    }
    kind->write_version(version, version_text, sizeof version_text);
    if (version < kind->least_version) {
        kind->write_version(kind->least_version, least_text, sizeof least_text);
        return hr_fail(error, HORO_ERR_RESOURCE, "%s is %s %s; horo needs %s", path, kind->what, version_text,
                       least_text);
    }
    *found = (horo_library){.version = version, .device_count = -1};
    (void)snprintf(found->name, sizeof found->name, "%s %s", kind->what, version_text);
    (void)snprintf(found->path, sizeof found->path, "%s", path);
    return HORO_OK;
}

/* RTLD_NODELETE: a driver that has been asked anything may have threads, and must not go away under them. */
static hr_status try_library(const struct hr_library_kind *kind, const char *name, int flags, void *table,
                             horo_library *found, struct reasons *reasons) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | flags);
    if (library == NULL) {
        if ((flags & RTLD_NOLOAD) == 0) {
            const char *reason = dlerror();
            add_reason(reasons, reason != NULL ? reason : name);
        }
        return HORO_ERR_RESOURCE;
    }
    struct hr_error error = {0};
    const int status = check(kind, library, name, table, found, &error);
    if (status != HORO_OK) {
        add_reason(reasons, error.text);
    }
    (void)dlclose(library); /* it stays */
    return status;
}

hr_status hr_library_load(const struct hr_library_kind *kind, const char *const *paths, size_t path_count, void *table,
                          horo_library *found, struct hr_error *error) {
    struct reasons reasons = {.length = 0};
    int status = HORO_ERR_RESOURCE;
    for (size_t i = 0; i < path_count && status != HORO_OK; i++) {
        const int is_loaded = paths[i][0] == '\0';
        status = try_library(kind, is_loaded ? kind->soname : paths[i], is_loaded ? RTLD_NOLOAD : 0, table, found,
                             &reasons);
    }
    if (status != HORO_OK) {
        return hr_fail(error, HORO_ERR_RESOURCE, "no usable %s: %s", kind->what,
                       reasons.length == 0 ? "there is no place to look for it" : reasons.text);
    }
    return HORO_OK;
}
