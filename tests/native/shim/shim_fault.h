/*
 * Deliberate faults: a sanitizer that lets one of these pass is not at work. Each returns a number that means nothing.
 */
#ifndef SHIM_FAULT_H
#define SHIM_FAULT_H

/* Reads one byte past a heap block (address). */
int shim_fault_overflow(void);
/* Adds 1 to INT_MAX (undefined). */
int shim_fault_integer(void);
/* Two threads write one variable without order (thread). */
int shim_fault_race(void);

#endif
