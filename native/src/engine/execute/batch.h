/*
 * The batch of a record: its requests and their operands, as the backend takes them. It is in struct hr_executor, and
 * the driver's.
 */
#ifndef HR_ENGINE_BATCH_H
#define HR_ENGINE_BATCH_H

#include "base/traits.h"
#include "engine/group/lane.h"

/* Grows, is never shrunk. */
struct hr_batch {
    struct hr_request **requests;
    size_t request_count, request_capacity;
    struct hr_operand *operands;
    size_t *row_bytes;
    size_t operand_count, operand_capacity;
    uint64_t bytes;
    uint64_t segment_before; /* team->segment, where it was begun ahead */
};

/* Fills lane->executor.batch with what a BATCH record stands for. HORO_OK or a status. */
int hr_batch_load(struct hr_lane *lane, const struct hr_wire_message *record);
/* Whether the batch of an operation is begun before it is agreed on: not without data, or with sizes of other ranks. */
static inline int hr_batch_is_begun_ahead(int op) {
    return hr_op_has_tensors(op) && !hr_op_tells_rows(op);
}
/*
 * Loads and begins such a batch, which the other ranks may not do: 1, or 0 where it cannot be prepared. take_back: they
 * do not; all is as before.
 */
int hr_batch_begin_ahead(struct hr_lane *lane, struct hr_request *request);
void hr_batch_take_back(struct hr_lane *lane, struct hr_request *request);
/* HR_DONE where that all have agreed is all there is to it, else HR_MOVED or a status. */
int hr_batch_begin(struct hr_lane *lane);

#endif
