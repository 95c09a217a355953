/* What the operations are called in messages. */
#ifndef HR_BASE_OP_H
#define HR_BASE_OP_H

/* "allreduce"; "unknown operation" for an unknown one. */
const char *hr_op_name(int op);

#endif
