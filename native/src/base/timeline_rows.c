/* From the events of the recorder to those of a timeline. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/op.h"
#include "base/timeline.h"

enum { IDLE, NEGOTIATING, RUNNING };

struct key {
    uint32_t hash;
    int32_t team;
};

/* Of a tensor; of requests with automatic names, of any of them, one at a time. */
struct hr_timeline_row {
    struct hr_timeline_row *next;
    struct key key;   /* of the request */
    int state;
    int pid;
    int op;
    int32_t team;     /* id of the team of the last request; -1: not known */
    int was_adasum;   /* the request of which a text came last */
    int has_phase;    /* one of its phases is open */
    int via;          /* while it runs, and where the record of its batch ends */
    int64_t record;
    int is_shared;    /* by requests with automatic names */
    int is_named;     /* its name has been written */
    char details[256]; /* dtype and shape, as members of a JSON object with a comma behind */
    char name[];      /* without the number of an automatic name */
};

static const char *const phase_names[] = {
    [HR_ADASUM_PACK] = "MEMCPY_IN_FUSION_BUFFER",
    [HR_ADASUM_SCATTER] = "ADASUM_ALLTOALL",
    [HR_ADASUM_MULTIPLY] = "ADASUM_DOT_PRODUCTS",
    [HR_ADASUM_SUM] = "ADASUM_SUM_OF_PRODUCTS",
    [HR_ADASUM_COMBINE] = "ADASUM_COMBINE",
    [HR_ADASUM_GATHER] = "ADASUM_ALLGATHER",
    [HR_ADASUM_UNPACK] = "MEMCPY_OUT_FUSION_BUFFER",
};
static const char *const via_names[] = {[HR_VIA_SHM] = "SHM", [HR_VIA_TCP] = "TCP", [HR_VIA_MPI] = "MPI",
                                       [HR_VIA_NCCL] = "NCCL"};

void hr_timeline_rows_fini(struct hr_timeline_rows *rows) {
    for (struct hr_timeline_row *row = rows->rows, *next; row != NULL; row = next) {
        next = row->next;
        free(row);
    }
    hr_map_fini(&rows->by_request);
    rows->rows = NULL;
}

static uint64_t hash_of(const struct key *key) {
    return hr_hash_number((int64_t)key->hash << 16 ^ key->team);
}

static struct hr_timeline_row *find(const struct hr_timeline_rows *rows, uint32_t hash, int team) {
    const struct key key = {hash, team};
    return hr_map_find(&rows->by_request, hash_of(&key), (const char *)&key, sizeof key);
}

/* JSON's form of a text in UTF-8. */
static void escape(const char *text, char *out, size_t out_bytes) {
    size_t at = 0;
    for (; *text != '\0' && at + 7 < out_bytes; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            out[at++] = '\\';
            out[at++] = *text;
        } else if (c < 0x20) {
            at += (size_t)snprintf(out + at, out_bytes - at, "\\u%04x", c);
        } else {
            out[at++] = *text;
        }
    }
    out[at] = '\0';
}

/* Times are in microseconds. */
static double at_us(struct hr_timeline_rows *rows, int64_t ns) {
    if (ns > rows->last_ns) {
        rows->last_ns = ns;
    }
    return (double)(rows->last_ns - rows->begin_ns) / 1e3;
}

static int is_adasum(const struct hr_timeline_row *row) {
    return row->was_adasum && row->op == HORO_ALLREDUCE;
}

/* As Horovod's; there, Adasum is an operation of its own. */
static const char *upper(const struct hr_timeline_row *row, char *out, size_t out_bytes) {
    const char *name = is_adasum(row) ? "adasum" : hr_op_name(row->op);
    size_t i = 0;
    for (; name[i] != '\0' && i + 1 < out_bytes; i++) {
        out[i] = (char)toupper((unsigned char)name[i]);
    }
    out[i] = '\0';
    return out;
}

static void begin(struct hr_timeline_rows *rows, const struct hr_timeline_row *row, const char *name, int64_t ns) {
    hr_trace_put(rows->file, "{\"name\": \"%s\", \"ph\": \"B\", \"ts\": %.3f, \"pid\": %d, \"tid\": 0}", name,
                 at_us(rows, ns), row->pid);
}

static void begin_op(struct hr_timeline_rows *rows, const struct hr_timeline_row *row, const char *prefix,
                     int64_t ns) {
    char op[32];
    char name[64];
    (void)snprintf(name, sizeof name, "%s%s", prefix, upper(row, op, sizeof op));
    begin(rows, row, name, ns);
}

/* Begins the moving of the data, named after what moves it: SHM_ALLREDUCE, MPI_ADASUM_ALLREDUCE. */
static void begin_data(struct hr_timeline_rows *rows, const struct hr_timeline_row *row, int64_t ns) {
    char op[32];
    char name[64];
    (void)snprintf(name, sizeof name, "%s_%s%s", via_names[row->via], upper(row, op, sizeof op),
                   is_adasum(row) ? "_ALLREDUCE" : "");
    begin(rows, row, name, ns);
}

static void end(struct hr_timeline_rows *rows, const struct hr_timeline_row *row, const char *arguments, int64_t ns) {
    hr_trace_put(rows->file, "{\"ph\": \"E\", \"ts\": %.3f, \"pid\": %d, \"tid\": 0%s%s%s}", at_us(rows, ns), row->pid,
                 arguments[0] == '\0' ? "" : ", \"args\": {", arguments, arguments[0] == '\0' ? "" : "}");
}

/* The length without the number of an automatic name; 0: it is none. */
static size_t automatic(const char *name) {
    static const char mark[] = ".noname.";
    const char *found = strstr(name, mark);
    if (found == NULL || strspn(found + sizeof mark - 1, "0123456789") != strlen(found + sizeof mark - 1)) {
        return 0;
    }
    return (size_t)(found - name) + sizeof mark - 2;
}

static void put_name(struct hr_timeline_rows *rows, struct hr_timeline_row *row) {
    char name[6 * HORO_MESSAGE_MAX];
    char set[32] = "";
    escape(row->name, name, sizeof name);
    if (row->key.team != 0) {
        (void)snprintf(set, sizeof set, "process set %d: ", (int)row->key.team);
    }
    hr_trace_put(rows->file,
                 "{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %d, \"tid\": 0, \"args\": {\"name\": \"%s%s\"}}",
                 row->pid, set, name);
    hr_trace_put(rows->file,
                 "{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": %d, \"tid\": 0, "
                 "\"args\": {\"sort_index\": %d}}",
                 row->pid, row->pid);
}

/* One that is free, of the requests with the automatic names that begin so. */
static struct hr_timeline_row *find_shared(struct hr_timeline_rows *rows, const char *name, size_t bytes, int team) {
    for (struct hr_timeline_row *row = rows->rows; row != NULL; row = row->next) {
        if (row->is_shared && row->state == IDLE && row->key.team == team && strlen(row->name) == bytes &&
            memcmp(row->name, name, bytes) == 0) {
            return row;
        }
    }
    return NULL;
}

static struct hr_timeline_row *add(struct hr_timeline_rows *rows, const char *name, uint32_t hash, int team) {
    const size_t shared_bytes = automatic(name);
    const size_t bytes = shared_bytes != 0 ? shared_bytes : strlen(name);
    struct hr_timeline_row *row = shared_bytes != 0 ? find_shared(rows, name, bytes, team) : NULL;
    if (row == NULL) {
        row = calloc(1, sizeof *row + bytes + 1);
        if (row == NULL) {
            return NULL;
        }
        memcpy(row->name, name, bytes);
        row->pid = ++rows->row_count;
        row->is_shared = shared_bytes != 0;
        row->key.team = team;
        row->team = -1;
        row->next = rows->rows;
        rows->rows = row;
        put_name(rows, row);
    }
    row->key = (struct key){hash, team};
    const int status =
        hr_map_insert(&rows->by_request, hash_of(&row->key), (const char *)&row->key, sizeof row->key, row);
    return status == HORO_OK ? row : NULL;
}

static void close_phase(struct hr_timeline_rows *rows, struct hr_timeline_row *row, int64_t ns) {
    if (row->has_phase) {
        end(rows, row, "", ns);
        row->has_phase = 0;
    }
}

static void close_row(struct hr_timeline_rows *rows, struct hr_timeline_row *row, const char *arguments, int64_t ns) {
    close_phase(rows, row, ns);
    if (row->state == RUNNING && row->via != HR_VIA_NONE) {
        end(rows, row, "", ns);
    }
    if (row->state != IDLE) {
        end(rows, row, arguments, ns);
    }
    row->state = IDLE;
    if (row->is_shared) {
        (void)hr_map_remove(&rows->by_request, hash_of(&row->key), (const char *)&row->key, sizeof row->key);
    }
}

static void show_text(struct hr_timeline_rows *rows, const horo_event *event) {
    const size_t offset = (size_t)((uint64_t)event->bytes & UINT32_MAX);
    const size_t whole = (size_t)((uint64_t)event->bytes >> 32);
    if (offset == 0) {
        rows->text_hash = (uint32_t)event->number;
        rows->text_bytes = 0;
        rows->text_whole = whole;
    }
    if (rows->text_hash != (uint32_t)event->number || offset != rows->text_bytes || whole > sizeof rows->text - 2) {
        rows->text_whole = 0;
        return;
    }
    const size_t left = whole - offset;
    const size_t bytes = left < HR_RECORDER_NAME_BYTES ? left : HR_RECORDER_NAME_BYTES;
    memcpy(rows->text + offset, event->name, bytes);
    rows->text_bytes += bytes;
}

/* Texts one behind the other, each with its terminator. */
static const char *text_after(const char *text) {
    return text + strlen(text) + 1;
}

/* The text that came before: the team's id, name, then, if there is a tensor, dtype, shape, whether it is Adasum. */
static struct hr_timeline_row *named(struct hr_timeline_rows *rows, const horo_event *event) {
    const uint32_t hash = (uint32_t)event->number;
    struct hr_timeline_row *row = find(rows, hash, event->team);
    const int is_whole =
        rows->text_whole != 0 && rows->text_hash == hash && rows->text_bytes == rows->text_whole;
    if (is_whole) {
        rows->text[rows->text_whole] = rows->text[rows->text_whole + 1] = '\0';
    }
    rows->text_whole = 0;
    if (row == NULL) {
        row = add(rows, is_whole ? text_after(rows->text) : event->name, hash, event->team);
    }
    if (row != NULL && is_whole) {
        const char *dtype = text_after(text_after(rows->text));
        row->team = (int32_t)strtol(rows->text, NULL, 10);
        row->details[0] = '\0';
        row->was_adasum = 0;
        if (dtype[0] != '\0') {
            const char *shape = text_after(dtype);
            (void)snprintf(row->details, sizeof row->details, "\"dtype\": \"%.16s\", \"shape\": \"%.200s\", ", dtype,
                           shape);
            row->was_adasum = text_after(shape)[0] != '\0';
        }
    }
    return row;
}

static void show_submitted(struct hr_timeline_rows *rows, const horo_event *event) {
    struct hr_timeline_row *row = named(rows, event);
    if (row == NULL) {
        return;
    }
    if (row->state == RUNNING) {
        close_row(rows, row, "", event->time_ns); /* its end is not known */
    }
    if (row->state == IDLE) {
        row->op = event->op;
        row->state = NEGOTIATING;
        begin_op(rows, row, "NEGOTIATE_", event->time_ns);
    }
}

/* A rank is ready; before this rank is, for a name that it does not know yet, it is not shown. */
static void show_announced(struct hr_timeline_rows *rows, const horo_event *event) {
    const struct hr_timeline_row *row = find(rows, (uint32_t)event->number, event->team);
    if (row != NULL) {
        hr_trace_put(rows->file,
                     "{\"name\": \"%d\", \"ph\": \"X\", \"ts\": %.3f, \"dur\": 0, \"pid\": %d, \"tid\": 0}",
                     (int)event->bytes, at_us(rows, event->time_ns), row->pid);
    }
}

static void show_agreed(struct hr_timeline_rows *rows, const horo_event *event) {
    struct hr_timeline_row *row = find(rows, (uint32_t)event->number, event->team);
    if (row == NULL) {
        row = add(rows, event->name, (uint32_t)event->number, event->team);
    }
    if (row == NULL) {
        return;
    }
    const int is_known = row->state == NEGOTIATING;
    if (is_known) {
        end(rows, row, "", event->time_ns);
    } else if (row->state == RUNNING) {
        close_row(rows, row, "", event->time_ns);
    }
    row->op = event->op;
    row->state = RUNNING;
    row->via = rows->via;
    row->record = rows->record;
    begin_op(rows, row, "", event->time_ns);
    if (row->via != HR_VIA_NONE) {
        begin_data(rows, row, event->time_ns);
    }
}

/* Of all rows of the batch: no other one of the team is running. */
static void show_phase(struct hr_timeline_rows *rows, const horo_event *event) {
    if (event->number < 0 || event->number > HR_ADASUM_UNPACK) {
        return;
    }
    for (struct hr_timeline_row *row = rows->rows; row != NULL; row = row->next) {
        if (row->state == RUNNING && is_adasum(row) && row->key.team == event->team) {
            close_phase(rows, row, event->time_ns);
            begin(rows, row, phase_names[event->number], event->time_ns);
            row->has_phase = 1;
        }
    }
}

static void show_done(struct hr_timeline_rows *rows, const horo_event *event) {
    struct hr_timeline_row *row = find(rows, (uint32_t)event->number, event->team);
    if (row == NULL || row->state == IDLE) {
        return;
    }
    char name[6 * HR_RECORDER_NAME_BYTES + 8];
    char arguments[768];
    escape(event->name, name, sizeof name);
    size_t at = (size_t)snprintf(arguments, sizeof arguments, "%s\"bytes\": %lld, \"tensor\": \"%s\"", row->details,
                                 (long long)event->bytes, name);
    if (row->state == RUNNING && row->team >= 0) {
        at += (size_t)snprintf(arguments + at, sizeof arguments - at, ", \"team\": %d, \"record\": %lld",
                               (int)row->team, (long long)row->record);
    }
    if (event->event == HORO_EVENT_FAILED) {
        (void)snprintf(arguments + at, sizeof arguments - at, ", \"error\": \"%s\"", horo_status_name(event->status));
    }
    close_row(rows, row, arguments, event->time_ns);
}

static void show_mark(struct hr_timeline_rows *rows, const char *name, const char *arguments, int64_t ns) {
    hr_trace_put(rows->file,
                 "{\"name\": \"%s\", \"ph\": \"i\", \"s\": \"g\", \"ts\": %.3f, \"pid\": 0, \"tid\": 0, "
                 "\"args\": {%s}}",
                 name, at_us(rows, ns), arguments);
}

static void show_batch(struct hr_timeline_rows *rows, const horo_event *event) {
    char arguments[96];
    if (rows->marks_batches) {
        (void)snprintf(arguments, sizeof arguments, "\"process_set\": %d, \"requests\": %d, \"bytes\": %lld",
                       (int)event->team, (int)event->number, (long long)event->bytes);
        show_mark(rows, "CYCLE_START", arguments, event->time_ns);
    }
}

static void show_end(struct hr_timeline_rows *rows, const horo_event *event) {
    char arguments[96];
    (void)snprintf(arguments, sizeof arguments, "\"rank\": %d, \"reason\": \"%s\"", (int)event->number,
                   event->event == HORO_EVENT_LEFT ? "shutdown" : horo_status_name(event->status));
    hr_timeline_end_all(rows, event->time_ns);
    show_mark(rows, "HORO_END", arguments, event->time_ns);
}

void hr_timeline_show(struct hr_timeline_rows *rows, const horo_event *event) {
    switch (event->event) {
    case HORO_EVENT_SUBMITTED: show_submitted(rows, event); break;
    case HORO_EVENT_AGREED: show_agreed(rows, event); break;
    case HORO_EVENT_BEGUN: show_batch(rows, event); break;
    case HORO_EVENT_ENDED:
    case HORO_EVENT_FAILED: show_done(rows, event); break;
    case HORO_EVENT_LEFT:
    case HORO_EVENT_LOST: show_end(rows, event); break;
    case HR_EVENT_ANNOUNCED: show_announced(rows, event); break;
    case HR_EVENT_TEXT: show_text(rows, event); break;
    case HR_EVENT_PHASE: show_phase(rows, event); break;
    case HR_EVENT_RECORD:
        rows->via = event->number;
        rows->record = event->bytes;
        break;
    default: break;
    }
}

void hr_timeline_show_loss(struct hr_timeline_rows *rows, uint64_t count) {
    char arguments[48];
    (void)snprintf(arguments, sizeof arguments, "\"count\": %llu", (unsigned long long)count);
    rows->via = HR_VIA_NONE;
    hr_timeline_end_all(rows, rows->last_ns);
    for (struct hr_timeline_row *row = rows->rows; row != NULL; row = row->next) {
        row->team = -1;
    }
    show_mark(rows, "EVENTS_LOST", arguments, rows->last_ns);
}

void hr_timeline_end_all(struct hr_timeline_rows *rows, int64_t now_ns) {
    for (struct hr_timeline_row *row = rows->rows; row != NULL; row = row->next) {
        close_row(rows, row, "", now_ns);
    }
}
