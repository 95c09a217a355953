/* Between the files of requests. All with the lock of the rank held. */
#ifndef HR_ENGINE_REQUESTS_PRIVATE_H
#define HR_ENGINE_REQUESTS_PRIVATE_H

#include "engine/requests/requests.h"

/* wait.c: the calling thread has submitted something, or waits. */
void hr_requests_note_caller(struct hr_requests *requests);

/*
 * request.c. Whether the request may be the next one of its name, behind refusals or alone; it is in flight: HORO_OK or
 * HORO_ERR_RESOURCE; it is no longer, and the one behind it takes its place.
 */
int hr_port_is_next(struct hr_request *request);
hr_status hr_port_add(struct hr_requests *requests, struct hr_request *request);
void hr_port_remove(struct hr_requests *requests, const struct hr_request *request);

#endif
