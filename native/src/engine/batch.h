/*
 * The batch of a record: its requests and their operands, as the backend takes them. It is in struct hr_executor, and
 * the driver's.
 */
#ifndef HR_ENGINE_BATCH_H
#define HR_ENGINE_BATCH_H

#include "engine/lane.h"

/* Grows, is never shrunk. */
struct hr_batch {
    struct hr_request **requests;
    size_t request_count, request_capacity;
    struct hr_operand *operands;
    size_t *row_bytes;
    size_t operand_count, operand_capacity;
    uint64_t bytes;
    int flows; /* some of its requests do */
};

/* Fills lane->executor.batch with what a BATCH record stands for. HORO_OK or a status. */
int hr_batch_load(struct hr_lane *lane, const struct hr_wire_message *record);
/* HR_TASK_DONE where that all have agreed is all there is to it, else HR_TASK_MOVED or a status. */
int hr_batch_begin(struct hr_lane *lane);

#endif
