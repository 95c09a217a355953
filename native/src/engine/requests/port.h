/*
 * A port: the part of a group that callers see. It has a name for each request that is not done, and it knows whether
 * more may come. Under the lock of the rank, unless a line says otherwise.
 */
#ifndef HR_ENGINE_REQUESTS_PORT_H
#define HR_ENGINE_REQUESTS_PORT_H

#include "base/map.h"
#include "engine/requests/request.h"
#include "node/team.h"

struct hr_lane;
struct hr_requests;

enum hr_port_state {
    HR_PORT_OPEN,
    HR_PORT_PAUSED,   /* nothing can be submitted until an operation is over that is the last (HR_OP_LAST) */
    HR_PORT_REMOVING, /* nor any more */
};

struct hr_port {
    struct hr_requests *requests;
    struct hr_team *team;
    struct hr_lane *lane; /* of whoever has made it */
    _Atomic int state;    /* enum hr_port_state; read by any thread */
    struct hr_map names;  /* name -> request that is not done, the first where others are behind it, or a stand-in */
    uint64_t call_count;   /* ordered calls submitted so far */
    struct hr_request *last_call; /* the newest that is not done; they are linked by next_call */
    struct hr_request *next_call; /* of these, the first that no record has been about */
    _Atomic uint32_t pending; /* how many, those behind others too; read by any thread */
};

/*
 * HORO_OK with the port of the process set of this id, NULL where this rank is no member; or HORO_ERR_USAGE with
 * *error set: it does not exist, or has been removed. `name` is that of the request which wants it, NULL for none.
 */
hr_status hr_port_find(const struct hr_requests *requests, int32_t id, const char *name, struct hr_port **port,
                       struct hr_error *error);
/* The requests that are not done, in the order in which they were submitted: the one after `last` (NULL: the first). */
struct hr_request *hr_port_next(const struct hr_port *port, const struct hr_request *last);
/* The next record about ordered calls is about this one; NULL: there is none. Without the lock. */
struct hr_request *hr_port_take_call(struct hr_port *port);
/* The request of this name that is not done; NULL: there is none. Without the lock. */
struct hr_request *hr_port_find_name(struct hr_port *port, struct hr_wire_text name);
/*
 * Ends the refusals behind which no call of this rank stands, only those behind others or all. The last one goes first,
 * so that none gets into the queue.
 */
void hr_port_drop_refusals(struct hr_port *port, int only_behind);
/* The calling thread has submitted something, or waits. */
void hr_requests_note_caller(struct hr_requests *requests);
/*
 * Whether the request may be the next one of its name, behind refusals or alone; it is in flight: HORO_OK or
 * HORO_ERR_RESOURCE; it is no longer, and the one behind it takes its place.
 */
int hr_port_is_next(struct hr_request *request);
hr_status hr_port_add(struct hr_requests *requests, struct hr_request *request);
void hr_port_remove(struct hr_requests *requests, const struct hr_request *request);

#endif
