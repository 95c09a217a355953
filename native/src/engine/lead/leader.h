/*
 * The leader of a host in one team: it collects what its ranks and the hosts below announce, agrees on it (the root) or
 * reports it (the others), hands the records of the log down and writes them for its host, and tells its neighbours in
 * the tree of hosts of the end. All of it is the driver's, but for what a line says.
 */
#ifndef HR_ENGINE_LEAD_LEADER_H
#define HR_ENGINE_LEAD_LEADER_H

#include <stdatomic.h>

#include "engine/agree/agree.h"
#include "engine/announce/announcer.h"
#include "engine/drive/drive.h"
#include "engine/round/round.h"

struct hr_lane;

/* Sanitizers and the stress program take every turn that would be spared, and end the process if one moves. */
#ifndef HR_CHECK_QUIET
#define HR_CHECK_QUIET 0
#endif

/* A control link to a neighbour in the tree of hosts: a stream of frames each way. */
struct hr_link {
    int host;
    int leader_rank;
    int open;
    int has_said_done;      /* the other leader has said DONE: the end of the link is no loss */
    uint64_t told_at;       /* the latest time of its own clock that a message has told */
    int has_no_memory;      /* for what came: nothing more is received, but what is to be sent still goes out */
    uint8_t *received;      /* being received */
    struct hr_io recv;
    struct hr_buffer in;      /* received; may end within a frame */
    struct hr_buffer out;     /* to be sent next */
    struct hr_buffer sending; /* being sent */
    struct hr_io send;
};

/*
 * A message that is none of the leader's own: of a member, or of the parent, which is member -1, at now_ns. HORO_OK or
 * a status.
 */
typedef int hr_leader_handler(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns);

struct hr_leader {
    struct hr_team *team;
    struct hr_announcer *announcer; /* of this rank, as the round is */
    struct hr_round *round;
    struct hr_drive *drive;
    hr_leader_handler *const *handlers;
    struct hr_lane *lane;
    int is_root;
    struct hr_agree agree;
    int *member_ranks;            /* [members] with the two other arrays of struct hr_agree_config behind it */
    struct hr_buffer *request_in; /* [local_size] frames from local ranks */
    struct hr_buffer log_out;     /* frames for the log ring */
    struct hr_carry carry;
    uint64_t tuning[HORO_KNOB_COUNT]; /* the root: of a record that comes before the next batch; under the lock */
    int is_tuning_final;              /* likewise */
    _Atomic int is_tuning_due;        /* written under it */
    uint64_t announced_seen;
    int has_news; /* since the last turn that has agreed on nothing and written nothing, see hr_leader_agree */
    struct hr_link *links; /* parent first if there is one, then children */
    int link_count;
    int has_parent;
    int leaver;          /* 1 + the rank that asked to leave, as far as this leader knows; 0: none has */
    struct hr_buffer leave_record; /* the root: the frame that closes the log */
    int expects_removal; /* the team is about to be removed, by all: the end of a link is no loss */
    int log_closed;      /* the LEAVE record has been written or passed on: nothing follows it */
    int told_abort, told_done;
    int64_t cycle_ns;
    int64_t batch_due_ns; /* a batch that is ready waits out its cycle time; HR_NEVER: none does */
};

struct hr_leader_setup {
    struct hr_drive *drive;             /* its lock */
    hr_leader_handler *const *handlers; /* [HR_WIRE_TYPES] NULL: no correct rank sends it */
    uint64_t fusion_bytes;
    int64_t cycle_ns;
};

/*
 * Opens the links, too. Announcer and round are this rank's, and the lane is what handlers get. HORO_OK, or a status
 * with *error set; fini in either case.
 */
int hr_leader_init(struct hr_leader *leader, const struct hr_leader_setup *setup, struct hr_announcer *announcer,
                   struct hr_round *round, struct hr_lane *lane, struct hr_error *error);
void hr_leader_fini(struct hr_leader *leader);

/* ---- A turn, in two halves ---- */

/* Takes in what this rank has announced, and what others have brought. HR_STILL, HR_MOVED or a status. */
int hr_leader_collect(struct hr_leader *leader);
/* Whether no record is under way here or due: so long, a round on the host needs no leader. */
int hr_leader_is_idle(const struct hr_leader *leader);
/*
 * Agrees on what has been announced, forms batches, writes the log and sends at once. This rank is at this place of the
 * order of the team. The round on the host is closed, unless the leader is idle. HR_STILL, HR_MOVED or a status.
 */
int hr_leader_agree(struct hr_leader *leader, uint64_t place);

/* ---- For those above ---- */

/* The root has these values written in front of its next batch. With the lock held. */
void hr_leader_make_due(struct hr_leader *leader, const uint64_t *values, int is_final);
/* A message for the parent; of the root, the next record of the log, unless that is closed. HORO_OK or a status. */
int hr_leader_tell_up(struct hr_leader *leader, const struct hr_wire_message *message);
/* The link of a member; -1 is the parent; NULL: it is of this host. */
static inline struct hr_link *hr_leader_link_of(const struct hr_leader *leader, int member) {
    const int is_local = member >= 0 && member < leader->team->local_size;
    const int index = member < 0 ? 0 : leader->has_parent + member - leader->team->local_size;
    return is_local ? NULL : &leader->links[index];
}
/* Moves what the links have, as of now_ns. HR_STILL, HR_MOVED or a status. */
int hr_leader_progress_links(struct hr_leader *leader, int64_t now_ns);
/* Whether something for another leader has not been handed to the system yet. */
int hr_leader_sends_left(const struct hr_leader *leader);

/* ---- The end ---- */

/* CLOSING: whether all of this host, and all hosts below it, have executed what stands before the LEAVE record. */
int hr_leader_is_done(const struct hr_leader *world);
/* ENDING: tells the neighbours of the end and sends what there is. 1: all is sent or cannot be; 0; a status. */
int hr_leader_flush_links(struct hr_leader *leader);

/* ---- Of control.c, for leader.c ---- */

hr_status hr_leader_open_links(struct hr_leader *leader, struct hr_error *error);
/* Takes in what a member announces. */
int hr_leader_announce(struct hr_leader *leader, int member, const struct hr_wire_message *message, int64_t now_ns);
/*
 * Takes the tensor out of the agreement whose data all members have carried, if all that is complete (the root: ready)
 * is that one, and appends a DATA or, at the root, a RESULT message: HR_MOVED. Else HR_STILL, or a status.
 */
int hr_leader_put_carried(struct hr_leader *leader, struct hr_buffer *out);
/* Agrees on, or reports, what all members have announced. HR_STILL, HR_MOVED or a status. */
int hr_leader_report(struct hr_leader *leader);
/* Records (framed) at the end of log_out from `mark` on also go to the child hosts. */
int hr_leader_hand_down(struct hr_leader *leader, size_t mark);
/* The next record for the log is LEAVE. */
void hr_leader_close_log(struct hr_leader *leader);

#endif
