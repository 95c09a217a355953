/*
 * Reading the memory of another rank of this host, by process_vm_readv: the kernel copies straight from there. It lets
 * a process do so that may also attach to it as a debugger; security modules, containers and filters of system calls
 * may refuse. So each rank shows in its arena block its process id and the place of its proof, a random number in its
 * private memory. Whoever reads that number under that process id reads the memory of that very process: in another
 * namespace, and after the death of a process whose id is used again, there is something else. Every read takes the
 * proof along, behind the data.
 */
#ifndef HR_NODE_PEER_MEMORY_H
#define HR_NODE_PEER_MEMORY_H

#include "node/node.h"

enum { HR_PEER_RANGES_MAX = 32 };

/* `bytes` at address `from` there go to `to` here. */
struct hr_peer_range {
    void *to;
    uint64_t from;
    size_t bytes;
};

/* Shows this rank's process and proof, before it is PRESENT. Without random numbers it shows none: nobody reads it. */
void hr_peer_memory_show(struct hr_node *node);

/*
 * Reads up to HR_PEER_RANGES_MAX ranges of a rank of this host (local index). 0, or an error number: ESRCH where the
 * process is gone, EFAULT where an address is none or its memory a device's, EPERM where the system refuses, and so on;
 * then what has been written to `to` is not to be used. Does not wait for the other rank.
 */
int hr_peer_memory_read(const struct hr_node *node, int local_rank, const struct hr_peer_range *ranges, int count);

#endif
