/*
 * The announcer of one rank in one team: what it announces to its leader, and what it remembers of names that have an
 * id. A leader announces like everybody else, but reads its own frames where they are. All of it is the driver's.
 */
#ifndef HR_ENGINE_ANNOUNCE_ANNOUNCER_H
#define HR_ENGINE_ANNOUNCE_ANNOUNCER_H

#include "base/buffer.h"
#include "base/map.h"
#include "base/pool.h"
#include "engine/requests/port.h"
#include "node/team.h"

struct hr_known; /* private to this room */

enum { HR_IDS_MAX = 256 }; /* in one message of a local rank */

struct hr_announcer {
    struct hr_team *team;
    struct hr_map known;     /* by canonical form */
    struct hr_pool pool;     /* of these */
    struct hr_known **slots; /* [capacity] by id % capacity */
    uint32_t capacity;
    struct hr_buffer out;     /* frames for my leader */
    uint32_t id_count;
    uint32_t ids[HR_IDS_MAX]; /* announced, not yet among these frames */
};

/* HORO_OK or HORO_ERR_RESOURCE; fini in either case. */
int hr_announcer_init(struct hr_announcer *announcer, struct hr_team *team, uint32_t capacity);
void hr_announcer_fini(struct hr_announcer *announcer);

/* Whether an id stands for what the request is: then it is announced by it, and in full otherwise. */
int hr_announcer_knows(struct hr_announcer *announcer, struct hr_request *request);
/* With so many bytes of its values (carried.h), or else with the rows that it tells, if any. */
int hr_announcer_put_id(struct hr_announcer *announcer, const struct hr_request *request, size_t carried);
int hr_announcer_put_full(struct hr_announcer *announcer, struct hr_request *request);
/* Any other message, behind all that has been announced. */
int hr_announcer_put(struct hr_announcer *announcer, const struct hr_wire_message *message);
/* Makes `out` whole: what follows is read there, or goes to the leader. */
int hr_announcer_write_ids(struct hr_announcer *announcer);
/* Not the leader: brings to it what there is room for. HR_STILL, HR_MOVED or a status. */
int hr_announcer_flush(struct hr_announcer *announcer);
/* Whether nothing is left of what has been announced. */
int hr_announcer_is_idle(const struct hr_announcer *announcer);

/* The request announced by this id and not done; NULL: there is none. */
struct hr_request *hr_announcer_pending(const struct hr_announcer *announcer, uint32_t id);
/*
 * A record means that request, which is announced no longer. Where there is none, *request is NULL, and *bytes the
 * canonical form that the id stands for. HORO_ERR_INTERNAL: it stands for nothing here, or for another call than the
 * next one of the port.
 */
int hr_announcer_take(struct hr_announcer *announcer, struct hr_port *port, uint32_t id, struct hr_request **request,
                      struct hr_wire_text *bytes);
/* It has failed, or all that is announced is about to (NULL), and is not to be touched any more. */
void hr_announcer_drop(const struct hr_announcer *announcer, const struct hr_request *request);
/* A record has given the request's name an id. What was announced by an id that is evicted is announced in full. */
int hr_announcer_learn(struct hr_announcer *announcer, const struct hr_request *request, uint32_t id);

#endif
