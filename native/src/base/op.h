/* The names of the operations in messages. */
#ifndef HR_BASE_OP_H
#define HR_BASE_OP_H

/* "allreduce"; "unknown operation" for an unknown one. */
const char *hr_op_name(int op);

/* Whether it combines values, so that it has a reduction, factors, and dtypes to travel as. */
int hr_op_reduces(int op);

/*
 * Whether each rank tells all others of rows, which may differ by rank and time, and gets results whose size comes of
 * them.
 */
int hr_op_tells_rows(int op);

/* Whether it moves data, or says which teams there are; else all that there is to it is that all have submitted it. */
int hr_op_has_tensors(int op);

/* Whether who submits it has nothing more to submit until all have done so; and the name of the requests for it. */
#define HR_JOIN_NAME "join.noname"
int hr_op_is_last(int op);

/* Whether a tensor of it has a first extent, which is cut or joined: scalars have none. */
int hr_op_needs_rows(int op);

/* Whether it changes which teams there are, and moves no data; and the name of the requests for it. */
#define HR_CHANGE_NAME "add_process_set or remove_process_set"
int hr_op_is_of_teams(int op);

/* Whether it changes who takes part, in one of these ways. */
int hr_op_is_of_members(int op);

/* Whether it moves data. */
int hr_op_moves_data(int op);

#endif
