/* calls.h: what the files of the module horo._calls share. They hold Python's lock, but where they wait. */
#ifndef HORO_PYTHON_CALLS_H
#define HORO_PYTHON_CALLS_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>
#include <structmember.h>

#include "dlpack.h"
#include "horo.h"

enum { OUT_DIMS_MAX = 8, SIGNAL_CHECK_MS = 100, NUMBER_ROOM = 21 };

/* The job. */
typedef struct {
    PyObject_HEAD
    horo_context **context; /* NULL there once it is destroyed */
    PyObject *kept;         /* dict: slots by key */
    PyObject *active_calls; /* dict: see Runtime */
    PyObject *abandoned;    /* dict */
    PyObject *taken_names;  /* dict */
    char ended, is_joining;
} Caller;

/* The numbers of automatic names. */
typedef struct {
    PyObject_HEAD
    long long next;
} Numbers;

/* The request that is kept for a form of call. */
typedef struct {
    PyObject_HEAD
    PyObject *key;         /* of the form of call; a tuple has items of the very types that it was made with */
    horo_request *request; /* with its tensor, in memory of the Python object that this one is a part of */
    int64_t *handle;
    Numbers *numbers;     /* of names, each of one call; NULL: all calls have one name */
    Py_ssize_t number_at; /* where the number is in a name */
    char is_taken;        /* a call uses it */
    char is_ready;        /* knows the tensors of the next call: */
    dlpack_dtype dtype;
    int32_t out_ndim;
    int64_t bytes, out_bytes, out_shape[OUT_DIMS_MAX];
} Slot;

#define HR_FAST(function) ((PyCFunction)(void (*)(void))(function))

/* A name that Python's lookups know by its address: texts are constants. NULL: an exception. */
static inline int hr_intern(PyObject **name, const char *text) {
    *name = PyUnicode_InternFromString(text);
    return *name != NULL;
}

/* The class, a new reference; NULL: an exception. Once. */
PyObject *hr_make_slot_type(void);
PyObject *hr_make_numbers_type(void);

/* `read`: NULL where torch has no table, and `CachedRequest.address` is asked. */
void hr_know_tensors(PyObject *tensor_type, dlpack_reader *read, PyObject *forward_mode);

/* The tensor for the result, a new reference; None: the slot does not fit this call; NULL: an exception. */
PyObject *hr_set_tensor(Slot *slot, PyObject *tensor, int in_place, PyObject *out);

/* Methods of the job, and functions of the module, for gradients: calls.py tells what they do. */
PyObject *hr_submit_each(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *hr_finish_each(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *hr_know_gradients(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *hr_is_shared(PyObject *module, PyObject *grad);
PyObject *hr_note_sharing(PyObject *module, PyObject *gradients);
PyObject *hr_pick(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *hr_changed(PyObject *module, PyObject *const *given, Py_ssize_t count);

/* Adds their classes to the module; whether it went well. Once. */
int hr_add_gradients(PyObject *module);

/* The end of an object of a class of this module, whose own fields are cleared. */
static inline void hr_free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#endif
