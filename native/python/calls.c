/*
 * calls.c: the module horo._calls, in the extension of the core: a call that comes again takes one crossing.
 *
 * horo/core/calls.py has what Python sees.
 */
#include "calls.h"

static Caller *caller_of_process;      /* the job of this process; its owner keeps it alive */
static PyObject *caller_profiling;     /* its _is_profiler_enabled is true while a profiler of torch runs */
static PyObject *caller_change_counter; /* a function of a sequence of tensors */

static struct {
    PyObject *is_profiler_enabled, *label, *begin_span, *end_span, *take_left, *admit, *go_on, *release_abandoned;
} caller_names;

static int is_profiled(void) {
    PyObject *found = PyObject_GetAttr(caller_profiling, caller_names.is_profiler_enabled);
    int is_so = found != NULL && found != Py_False && PyObject_IsTrue(found);
    Py_XDECREF(found);
    PyErr_Clear();
    return is_so;
}

/* Calls a method for what it does; whether it went well. */
static int call(void *object, PyObject *method, PyObject *argument) {
    PyObject *done = PyObject_CallMethodObjArgs(object, method, argument, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

static int submit_and_wait(Caller *caller, Slot *slot) {
    int is_usual = !caller->ended && !caller->is_joining && PyDict_Size(caller->abandoned) == 0 &&
                   PyDict_Size(caller->taken_names) == 0;
    if (!is_usual && !call(caller, caller_names.admit, (PyObject *)slot)) {
        return 0;
    }
    horo_context *context = *caller->context;
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = horo_run(context, slot->request, SIGNAL_CHECK_MS, slot->handle, NULL, 0);
    Py_END_ALLOW_THREADS
    return status == HORO_OK || call(caller, caller_names.go_on, (PyObject *)slot);
}

/* Calls a method that has to be called after an exception, too; one of its own takes the place of that. */
static int call_at_end(void *object, PyObject *method, PyObject *argument) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    int is_done = call(object, method, argument);
    if (is_done) {
        PyErr_Restore(kind, error, trace);
    } else {
        Py_XDECREF(kind);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    }
    return is_done;
}

/* Keeps the memory of a call that an exception has ended until the core is done with it. */
static void abandon(Caller *caller, Slot *slot, PyObject *memory) {
    PyObject *kind, *error, *trace, *handle;
    PyErr_Fetch(&kind, &error, &trace);
    handle = PyLong_FromLongLong(*slot->handle);
    if (handle == NULL || PyDict_SetItem(caller->abandoned, handle, memory) != 0) {
        PyErr_Clear();
        Py_INCREF(memory); /* for good */
    }
    Py_XDECREF(handle);
    PyErr_Restore(kind, error, trace);
    call_at_end(caller, caller_names.release_abandoned, NULL);
}

/* Gives this call an automatic name, unless the slot has a name; whether it went well. */
static int give_name(Caller *caller, Slot *slot) {
    if (slot->numbers == NULL) {
        return 1;
    }
    if (caller->is_joining) { /* the number would be one of before the join */
        return call(slot, caller_names.label, NULL);
    }
    snprintf((char *)slot->request->name + slot->number_at, NUMBER_ROOM, "%lld", slot->numbers->next++);
    return 1;
}

/* Runs the request of a slot that this call has taken, whose tensors are set; whether it went well. */
static int run(Caller *caller, Slot *slot, PyObject *memory) {
    PyObject *shown = NULL, *kind, *error, *trace;
    if (!give_name(caller, slot)) {
        return 0;
    }
    if (is_profiled()) {
        shown = PyObject_CallMethodObjArgs((PyObject *)slot, caller_names.begin_span, NULL);
        if (shown == NULL) {
            return 0;
        }
    }
    *slot->handle = 0;
    int is_done = PyDict_SetItem(caller->active_calls, (PyObject *)slot, memory) == 0 && submit_and_wait(caller, slot);
    if (shown != NULL && !call_at_end(slot, caller_names.end_span, shown)) {
        is_done = 0;
    }
    Py_XDECREF(shown);
    if (!is_done && *slot->handle != 0) {
        abandon(caller, slot, memory);
    }
    PyErr_Fetch(&kind, &error, &trace);
    if (PyDict_DelItem(caller->active_calls, (PyObject *)slot) != 0) {
        PyErr_Clear();
    }
    PyErr_Restore(kind, error, trace);
    return is_done;
}

/* execute(slot, memory) */
static PyObject *caller_execute(PyObject *self, PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    return run((Caller *)self, (Slot *)given[0], given[1]) ? Py_NewRef(Py_None) : NULL;
}

/* use(place): is the job of this process from now on. */
static PyObject *caller_use(PyObject *self, PyObject *place) {
    Caller *caller = (Caller *)self;
    caller->context = PyLong_AsVoidPtr(place);
    if (PyErr_Occurred()) {
        return NULL;
    }
    caller_of_process = caller;
    return Py_NewRef(Py_None);
}

/* The slot that was made for this very key and that no call uses; NULL without an exception: there is none. */
static Slot *find_slot(Caller *caller, PyObject *key) {
    PyObject *found = caller == NULL ? NULL : PyDict_GetItemWithError(caller->kept, key);
    if (found == NULL) {
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear(); /* a name that cannot be hashed is no string */
        }
        return NULL;
    }
    Slot *slot = (Slot *)found;
    for (Py_ssize_t i = PyTuple_Check(key) ? PyTuple_Size(key) : 0; i-- > 0;) { /* True is equal to 1, and to Sum */
        if (Py_TYPE(PyTuple_GetItem(key, i)) != Py_TYPE(PyTuple_GetItem(slot->key, i))) {
            return NULL;
        }
    }
    return slot->is_taken ? NULL : slot;
}

static int count_change(PyObject *tensor) {
    PyObject *only = PyTuple_Pack(1, tensor);
    PyObject *done = only == NULL ? NULL : PyObject_CallFunctionObjArgs(caller_change_counter, only, NULL);
    Py_XDECREF(only);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *run_with(Caller *caller, Slot *slot, PyObject *tensor, int in_place, PyObject *out) {
    PyObject *result = hr_set_tensor(slot, tensor, in_place, out);
    if (result == NULL || result == Py_None) {
        return result;
    }
    PyObject *memory = PyTuple_Pack(2, tensor, result);
    int is_done = memory != NULL && run(caller, slot, memory) &&
                  ((!in_place && out == Py_None) || count_change(result));
    PyObject *returned = is_done ? Py_NewRef(result) : NULL;
    if (is_done && *slot->handle != 0) { /* of an allgather or alltoall */
        Py_DECREF(returned);
        PyObject *self = (PyObject *)caller;
        returned = PyObject_CallMethodObjArgs(self, caller_names.take_left, slot, tensor, result, out, NULL);
        if (returned == NULL) {
            abandon(caller, slot, memory);
        }
    }
    Py_XDECREF(memory);
    Py_DECREF(result);
    return returned;
}

/* repeat(key, tensor, in_place, out) */
static PyObject *repeat(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    Caller *caller = caller_of_process;
    Py_XINCREF(caller); /* a key may run code of Python, and another thread meanwhile */
    Slot *slot = find_slot(caller, given[0]);
    PyObject *result = slot != NULL || PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (slot != NULL) {
        Py_INCREF(slot);
        slot->is_taken = 1;
        result = run_with(caller, slot, given[1], given[2] == Py_True, given[3]);
        slot->is_taken = 0;
        Py_DECREF(slot);
    }
    Py_XDECREF(caller);
    return result;
}

static int caller_traverse(PyObject *self, visitproc visit, void *arg) {
    Caller *caller = (Caller *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(caller->kept);
    Py_VISIT(caller->active_calls);
    Py_VISIT(caller->abandoned);
    Py_VISIT(caller->taken_names);
    return 0;
}

static int caller_clear(PyObject *self) {
    Caller *caller = (Caller *)self;
    Py_CLEAR(caller->kept);
    Py_CLEAR(caller->active_calls);
    Py_CLEAR(caller->abandoned);
    Py_CLEAR(caller->taken_names);
    return 0;
}

static void caller_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    if (caller_of_process == (Caller *)self) {
        caller_of_process = NULL;
    }
    caller_clear(self);
    hr_free_object(self);
}

/* know_torch(Tensor, exchange, profiling, count_change, forward_mode); exchange: DLPack's table (capsule) or None */
static PyObject *know_torch(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    const dlpack_table *table = given[1] == Py_None ? NULL : PyCapsule_GetPointer(given[1], "dlpack_exchange_api");
    if (PyErr_Occurred()) {
        return NULL;
    }
    dlpack_reader *read = table != NULL && table->major == DLPACK_MAJOR ? table->read : NULL;
    hr_know_tensors(given[0], read, given[4]);
    caller_profiling = Py_NewRef(given[2]);
    caller_change_counter = Py_NewRef(given[3]);
    return Py_NewRef(Py_None);
}

static PyMethodDef caller_methods[] = {
    {"execute", HR_FAST(caller_execute), METH_FASTCALL, NULL},
    {"submit_each", HR_FAST(hr_submit_each), METH_FASTCALL, NULL},
    {"finish_each", HR_FAST(hr_finish_each), METH_FASTCALL, NULL},
    {"use", caller_use, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef caller_members[] = {
    {"kept", T_OBJECT, offsetof(Caller, kept), 0, NULL},
    {"active_calls", T_OBJECT, offsetof(Caller, active_calls), 0, NULL},
    {"abandoned", T_OBJECT, offsetof(Caller, abandoned), 0, NULL},
    {"taken_names", T_OBJECT, offsetof(Caller, taken_names), 0, NULL},
    {"ended", T_BOOL, offsetof(Caller, ended), 0, NULL},
    {"is_joining", T_BOOL, offsetof(Caller, is_joining), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot caller_slots[] = {
    {Py_tp_methods, caller_methods}, {Py_tp_members, caller_members}, {Py_tp_dealloc, caller_dealloc},
    {Py_tp_traverse, caller_traverse}, {Py_tp_clear, caller_clear}, {0, NULL},
};
static PyType_Spec caller_spec = {
    "horo._calls.Caller", sizeof(Caller), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    caller_slots,
};

static PyMethodDef caller_functions[] = {
    {"repeat", HR_FAST(repeat), METH_FASTCALL, NULL},
    {"know_torch", HR_FAST(know_torch), METH_FASTCALL, NULL},
    {"know_gradients", HR_FAST(hr_know_gradients), METH_FASTCALL, NULL},
    {"is_shared", hr_is_shared, METH_O, NULL},
    {"note_sharing", hr_note_sharing, METH_O, NULL},
    {"pick", HR_FAST(hr_pick), METH_FASTCALL, NULL},
    {"changed", HR_FAST(hr_changed), METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef caller_definition = {
    PyModuleDef_HEAD_INIT, "horo._calls", NULL, -1, caller_functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__calls(void);

PyMODINIT_FUNC PyInit__calls(void) {
    int is_named =
        hr_intern(&caller_names.is_profiler_enabled, "_is_profiler_enabled") &&
        hr_intern(&caller_names.label, "label") && hr_intern(&caller_names.begin_span, "begin_span") &&
        hr_intern(&caller_names.end_span, "end_span") && hr_intern(&caller_names.take_left, "take_left") &&
        hr_intern(&caller_names.admit, "admit") && hr_intern(&caller_names.go_on, "go_on") &&
        hr_intern(&caller_names.release_abandoned, "release_abandoned");
    PyObject *module = is_named ? PyModule_Create(&caller_definition) : NULL;
    PyObject *numbers = hr_make_numbers_type(), *slot = hr_make_slot_type(), *caller = PyType_FromSpec(&caller_spec);
    if (module == NULL || numbers == NULL || slot == NULL || caller == NULL ||
        PyModule_AddObjectRef(module, "Numbers", numbers) != 0 || PyModule_AddObjectRef(module, "Slot", slot) != 0 ||
        PyModule_AddObjectRef(module, "Caller", caller) != 0 || !hr_add_gradients(module)) {
        Py_XDECREF(module);
        module = NULL;
    }
    Py_XDECREF(numbers);
    Py_XDECREF(slot);
    Py_XDECREF(caller);
    return module;
}
