/*
 * An MPI that does nothing but what a test tells it, for errors that a real one does not make when asked. One per
 * process; any thread may call it.
 */
#ifndef SHIM_FAKE_MPI_H
#define SHIM_FAKE_MPI_H

/* cffi: skip */
#include "horo.h"
/* cffi: end */

typedef struct {
    int post_error;     /* what posting returns */
    int test_error;     /* what testing returns */
    int completes;      /* requests are done when tested */
    int obeys_cancel;   /* cancelled ones are */
    int is_finalized;
    int posted, cancelled, freed, calls; /* counted; calls but for MPI_Finalized */
} shim_fake_state;

/* Everything back to zero; the same state every time. */
shim_fake_state *shim_fake_reset(void);
/* Fills in what describes it, with handles that are pointers, for `size` ranks. */
void shim_fake_describe(horo_mpi *calls, int size);

#endif
