/*
 * calls.c: the module horo._calls, in the extension of the core: a call that comes again takes one crossing from Python.
 *
 * The request that is kept for a form of call (Slot) gets the addresses of this call's tensors, and runs. All functions
 * hold Python's lock, but where they wait. horo/core/calls.py has what Python sees.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>
#include <structmember.h>

#include "dlpack.h"
#include "horo.h"

enum { SIGNAL_CHECK_MS = 100, OUT_DIMS_MAX = 8 };

typedef struct {
    PyObject_HEAD
    PyObject *key;         /* of the form of call; a tuple has items of the very types that it was made with */
    horo_request *request; /* with its tensor, in memory of the Python object that this one is a part of */
    int64_t *handle;
    char is_taken;     /* a call uses it */
    char is_automatic; /* each call has a name of its own */
    char is_ready;     /* knows the tensors of the next call: */
    dlpack_dtype dtype;
    int32_t out_ndim;
    int64_t bytes, out_bytes, out_shape[OUT_DIMS_MAX];
} Slot;

typedef struct {
    PyObject_HEAD
    horo_context *context;
    PyObject *kept;         /* dict: slots by key */
    PyObject *active_calls; /* dict: see Runtime */
    PyObject *abandoned;    /* dict */
    PyObject *taken_names;  /* dict */
    char ended, is_joining;
} Caller;

static Caller *of_process; /* the job of this process; its owner keeps it alive */

/* torch, as `know_torch` was told */
static struct {
    PyObject *tensor_type;
    PyObject *profiling;    /* its _is_profiler_enabled is true while a profiler runs */
    PyObject *count_change; /* of a sequence of tensors */
    dlpack_reader *read;    /* NULL: this torch has none, and `CachedRequest.address` is asked */
} torch;

static struct {
    PyObject *requires_grad, *is_neg, *untyped_storage, *storage_offset, *data_ptr, *is_profiler_enabled;
    PyObject *address, *new_output, *label, *begin_span, *end_span, *take_left, *admit, *go_on, *release_abandoned;
} names;

/* -- a slot --------------------------------------------------------------------------------------------------------- */

static int is_dense(const dlpack_tensor *tensor)
{
    int64_t stride = 1;
    for (int32_t i = tensor->ndim; tensor->strides != NULL && i-- > 0;) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != stride) {
            return 0;
        }
        stride *= tensor->shape[i];
    }
    return 1;
}

/* Reads a tensor of torch's own class in host memory: dense, not empty. 0: it is none, or horo cannot work on it. */
static int read_tensor(PyObject *object, dlpack_tensor *tensor)
{
    if ((PyObject *)Py_TYPE(object) != torch.tensor_type) {
        return 0;
    }
    if (torch.read(object, tensor) != 0) { /* no code of Python has run: no exception of a signal handler is lost */
        PyErr_Clear();
        return 0;
    }
    return tensor->device.type == DLPACK_CPU && tensor->data != NULL && tensor->byte_offset == 0 && is_dense(tensor);
}

/* Calls a method of a tensor that runs no code of Python, and has a number; -1: failed. */
static long long number_of(PyObject *tensor, PyObject *method)
{
    PyObject *found = PyObject_CallMethodObjArgs(tensor, method, NULL);
    long long number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

/* Whether a tensor is what DLPack does not tell: without a graph, not negated lazily, its storage not cut off. */
static int is_plain(PyObject *object, dlpack_dtype dtype, int64_t bytes)
{
    PyObject *requires_grad = PyObject_GetAttr(object, names.requires_grad);
    int is_so = requires_grad == Py_False && number_of(object, names.is_neg) == 0;
    Py_XDECREF(requires_grad);
    if (is_so) {
        PyObject *storage = PyObject_CallMethodObjArgs(object, names.untyped_storage, NULL);
        int64_t offset = number_of(object, names.storage_offset) * ((dtype.bits * dtype.lanes + 7) / 8);
        is_so = storage != NULL && offset >= 0 && PyObject_Size(storage) >= offset + bytes;
        Py_XDECREF(storage);
    }
    PyErr_Clear();
    return is_so;
}

/* The address of a tensor (or of the memory for a result) that looks as the slot knows it, else NULL. */
static char *address_in(const Slot *slot, PyObject *object, int is_out)
{
    if (torch.read == NULL) {
        PyObject *found = PyObject_CallMethodObjArgs((PyObject *)slot, names.address, object,
                                                     is_out ? Py_True : Py_False, NULL);
        char *address = found == NULL ? NULL : PyLong_AsVoidPtr(found);
        Py_XDECREF(found);
        return address;
    }
    const horo_tensor *row = slot->request->tensors;
    int32_t ndim = is_out ? slot->out_ndim : row->ndim;
    const int64_t *shape = is_out ? slot->out_shape : row->shape;
    dlpack_tensor tensor;
    if (!read_tensor(object, &tensor) || memcmp(&tensor.dtype, &slot->dtype, sizeof tensor.dtype) != 0 ||
        tensor.ndim != ndim) {
        return NULL;
    }
    for (int32_t i = 0; i < ndim; i++) {
        if (tensor.shape[i] != shape[i]) {
            return NULL;
        }
    }
    return is_plain(object, tensor.dtype, is_out ? slot->out_bytes : slot->bytes) ? tensor.data : NULL;
}

/* The tensor for the result, a new reference; None: the slot does not fit this call; NULL: an exception. */
static PyObject *set_tensor(Slot *slot, PyObject *tensor, int in_place, PyObject *out)
{
    char *from = slot->is_ready ? address_in(slot, tensor, 0) : NULL, *to = from;
    if (from == NULL) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    PyObject *result = Py_NewRef(in_place ? tensor : out);
    if (!in_place && out != Py_None) {
        to = address_in(slot, out, 1);
        if (to == NULL || (to < from + slot->bytes && from < to + slot->out_bytes)) {
            Py_DECREF(result);
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        }
    } else if (!in_place) {
        Py_DECREF(result);
        result = PyObject_CallMethodObjArgs((PyObject *)slot, names.new_output, tensor, NULL);
        to = result == NULL ? NULL : (char *)number_of(result, names.data_ptr);
        if (PyErr_Occurred()) {
            Py_XDECREF(result);
            return NULL;
        }
    }
    horo_tensor *row = (horo_tensor *)slot->request->tensors;
    row->input = from;
    row->output = to;
    return result;
}

static PyObject *slot_set_tensor(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return set_tensor((Slot *)self, given[0], given[1] == Py_True, count > 2 ? given[2] : Py_None);
}

/* learn(tensor, result, bytes, bytes of result): is ready for a tensor that looks like this one, and results, too. */
static PyObject *slot_learn(PyObject *self, PyObject *const *given, Py_ssize_t Py_UNUSED(count))
{
    Slot *slot = (Slot *)self;
    dlpack_tensor tensor, out;
    slot->is_ready = 0;
    slot->bytes = PyLong_AsLongLong(given[2]);
    slot->out_bytes = PyLong_AsLongLong(given[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (torch.read == NULL) {
        slot->is_ready = 1;
    } else if (read_tensor(given[0], &tensor) && torch.read(given[1], &out) == 0 && out.ndim <= OUT_DIMS_MAX) {
        slot->dtype = tensor.dtype;
        slot->out_ndim = out.ndim;
        for (int32_t i = 0; i < out.ndim; i++) {
            slot->out_shape[i] = out.shape[i];
        }
        slot->is_ready = 1;
    }
    PyErr_Clear();
    return Py_NewRef(Py_None);
}

/* bind(request, handle, is_automatic): addresses in memory that lives as long as this object. */
static PyObject *slot_bind(PyObject *self, PyObject *const *given, Py_ssize_t Py_UNUSED(count))
{
    Slot *slot = (Slot *)self;
    slot->request = PyLong_AsVoidPtr(given[0]);
    slot->handle = PyLong_AsVoidPtr(given[1]);
    slot->is_automatic = given[2] == Py_True;
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *slot_take(PyObject *self, PyObject *Py_UNUSED(none))
{
    Slot *slot = (Slot *)self;
    PyObject *was_free = slot->is_taken ? Py_False : Py_True;
    slot->is_taken = 1;
    return Py_NewRef(was_free);
}

/* -- a call --------------------------------------------------------------------------------------------------------- */

static int is_profiled(void)
{
    PyObject *found = PyObject_GetAttr(torch.profiling, names.is_profiler_enabled);
    int is_so = found != NULL && found != Py_False && PyObject_IsTrue(found);
    Py_XDECREF(found);
    PyErr_Clear();
    return is_so;
}

/* Calls a method for what it does; whether it went well. */
static int call(void *object, PyObject *method, PyObject *argument)
{
    PyObject *done = PyObject_CallMethodObjArgs(object, method, argument, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

static int submit_and_wait(Caller *caller, Slot *slot)
{
    if ((caller->ended || caller->is_joining || PyDict_Size(caller->abandoned) || PyDict_Size(caller->taken_names)) &&
        !call(caller, names.admit, (PyObject *)slot)) {
        return 0;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = horo_run(caller->context, slot->request, SIGNAL_CHECK_MS, slot->handle, NULL, 0);
    Py_END_ALLOW_THREADS
    return status == HORO_OK || call(caller, names.go_on, (PyObject *)slot);
}

/* What Python left by an exception is the core's still: it is kept until that is done with it. */
static void abandon(Caller *caller, Slot *slot, PyObject *memory)
{
    PyObject *kind, *error, *trace, *handle;
    PyErr_Fetch(&kind, &error, &trace);
    handle = PyLong_FromLongLong(*slot->handle);
    if (handle == NULL || PyDict_SetItem(caller->abandoned, handle, memory) != 0) {
        PyErr_Clear();
        Py_INCREF(memory); /* for good */
    }
    Py_XDECREF(handle);
    if (!call(caller, names.release_abandoned, NULL)) {
        PyErr_Clear();
    }
    PyErr_Restore(kind, error, trace);
}

/* Runs the request of a slot that this call has taken, whose tensors are set; whether it went well. */
static int run(Caller *caller, Slot *slot, PyObject *memory)
{
    PyObject *shown = NULL, *kind, *error, *trace;
    if (slot->is_automatic && !call(slot, names.label, NULL)) {
        return 0;
    }
    if (is_profiled() && (shown = PyObject_CallMethodObjArgs((PyObject *)slot, names.begin_span, NULL)) == NULL) {
        return 0;
    }
    *slot->handle = 0;
    int is_done = PyDict_SetItem(caller->active_calls, (PyObject *)slot, memory) == 0 && submit_and_wait(caller, slot);
    if (!is_done && *slot->handle != 0) {
        abandon(caller, slot, memory);
    }
    PyErr_Fetch(&kind, &error, &trace);
    if (PyDict_DelItem(caller->active_calls, (PyObject *)slot) != 0) {
        PyErr_Clear();
    }
    if (shown != NULL && !call(slot, names.end_span, shown)) {
        PyErr_Clear();
    }
    Py_XDECREF(shown);
    PyErr_Restore(kind, error, trace);
    return is_done;
}

/* execute(slot, memory) */
static PyObject *caller_execute(PyObject *self, PyObject *const *given, Py_ssize_t Py_UNUSED(count))
{
    return run((Caller *)self, (Slot *)given[0], given[1]) ? Py_NewRef(Py_None) : NULL;
}

/* use(): is the job of this process from now on. */
static PyObject *caller_use(PyObject *self, PyObject *context)
{
    Caller *caller = (Caller *)self;
    caller->context = PyLong_AsVoidPtr(context);
    if (PyErr_Occurred()) {
        return NULL;
    }
    of_process = caller;
    return Py_NewRef(Py_None);
}

/* The slot that was made for this very key and that no call uses; NULL without an exception: there is none. */
static Slot *find_slot(Caller *caller, PyObject *key)
{
    PyObject *found = caller == NULL ? NULL : PyDict_GetItemWithError(caller->kept, key);
    if (found == NULL) {
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) { /* a name that cannot be hashed, so it is no string */
            PyErr_Clear();
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

static int count_change(PyObject *tensor)
{
    PyObject *only = PyTuple_Pack(1, tensor);
    PyObject *done = only == NULL ? NULL : PyObject_CallFunctionObjArgs(torch.count_change, only, NULL);
    Py_XDECREF(only);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *run_with(Caller *caller, Slot *slot, PyObject *tensor, int in_place, PyObject *out)
{
    PyObject *result = set_tensor(slot, tensor, in_place, out);
    if (result == NULL || result == Py_None) {
        return result;
    }
    PyObject *memory = PyTuple_Pack(2, tensor, result);
    int is_done = memory != NULL && run(caller, slot, memory) &&
                  ((!in_place && out == Py_None) || count_change(result));
    PyObject *returned = is_done ? Py_NewRef(result) : NULL;
    if (is_done && *slot->handle != 0) { /* of an allgather or alltoall */
        Py_DECREF(returned);
        returned = PyObject_CallMethodObjArgs((PyObject *)caller, names.take_left, slot, tensor, result, out, NULL);
        if (returned == NULL) {
            abandon(caller, slot, memory);
        }
    }
    Py_XDECREF(memory);
    Py_DECREF(result);
    return returned;
}

/* repeat(key, tensor, in_place, out) */
static PyObject *repeat(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t Py_UNUSED(count))
{
    Slot *slot = find_slot(of_process, given[0]);
    if (slot == NULL) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    Caller *caller = of_process;
    Py_INCREF(caller);
    Py_INCREF(slot);
    slot->is_taken = 1;
    PyObject *result = run_with(caller, slot, given[1], given[2] == Py_True, given[3]);
    slot->is_taken = 0;
    Py_DECREF(slot);
    Py_DECREF(caller);
    return result;
}

/* -- the module ----------------------------------------------------------------------------------------------------- */

static int caller_traverse(PyObject *self, visitproc visit, void *arg)
{
    Caller *caller = (Caller *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(caller->kept);
    Py_VISIT(caller->active_calls);
    Py_VISIT(caller->abandoned);
    Py_VISIT(caller->taken_names);
    return 0;
}

static int caller_clear(PyObject *self)
{
    Caller *caller = (Caller *)self;
    Py_CLEAR(caller->kept);
    Py_CLEAR(caller->active_calls);
    Py_CLEAR(caller->abandoned);
    Py_CLEAR(caller->taken_names);
    return 0;
}

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void caller_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    if (of_process == (Caller *)self) {
        of_process = NULL;
    }
    caller_clear(self);
    free_object(self);
}

static void slot_dealloc(PyObject *self)
{
    Py_CLEAR(((Slot *)self)->key);
    free_object(self);
}

/* know_torch(Tensor, exchange, profiling, count_change); exchange: the capsule of DLPack's table, or None */
static PyObject *know_torch(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t Py_UNUSED(count))
{
    const dlpack_table *table = given[1] == Py_None ? NULL : PyCapsule_GetPointer(given[1], "dlpack_exchange_api");
    if (PyErr_Occurred()) {
        return NULL;
    }
    torch.read = table != NULL && table->major == DLPACK_MAJOR ? table->read : NULL;
    torch.tensor_type = Py_NewRef(given[0]);
    torch.profiling = Py_NewRef(given[2]);
    torch.count_change = Py_NewRef(given[3]);
    return Py_NewRef(Py_None);
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef slot_methods[] = {
    {"set_tensor", FAST(slot_set_tensor), METH_FASTCALL, NULL},
    {"learn", FAST(slot_learn), METH_FASTCALL, NULL},
    {"bind", FAST(slot_bind), METH_FASTCALL, NULL},
    {"take", slot_take, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef slot_members[] = {
    {"key", T_OBJECT, offsetof(Slot, key), 0, NULL},
    {"is_taken", T_BOOL, offsetof(Slot, is_taken), 0, NULL},
    {"is_ready", T_BOOL, offsetof(Slot, is_ready), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slot_slots[] = {
    {Py_tp_methods, slot_methods}, {Py_tp_members, slot_members}, {Py_tp_dealloc, slot_dealloc}, {0, NULL},
};
static PyType_Spec slot_spec = {
    "horo._calls.Slot", sizeof(Slot), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slot_slots,
};

static PyMethodDef caller_methods[] = {
    {"execute", FAST(caller_execute), METH_FASTCALL, NULL},
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
    "horo._calls.Caller", sizeof(Caller), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, caller_slots,
};

static PyMethodDef functions[] = {
    {"repeat", FAST(repeat), METH_FASTCALL, NULL},
    {"know_torch", FAST(know_torch), METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "horo._calls", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__calls(void);

PyMODINIT_FUNC PyInit__calls(void)
{
    static const struct {
        PyObject **name;
        const char *text;
    } all[] = {
        {&names.requires_grad, "requires_grad"}, {&names.is_neg, "is_neg"},
        {&names.untyped_storage, "untyped_storage"}, {&names.storage_offset, "storage_offset"},
        {&names.data_ptr, "data_ptr"}, {&names.is_profiler_enabled, "_is_profiler_enabled"},
        {&names.address, "address"}, {&names.new_output, "new_output"}, {&names.label, "label"},
        {&names.begin_span, "begin_span"}, {&names.end_span, "end_span"}, {&names.take_left, "take_left"},
        {&names.admit, "admit"}, {&names.go_on, "go_on"}, {&names.release_abandoned, "release_abandoned"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if ((*all[i].name = PyUnicode_InternFromString(all[i].text)) == NULL) {
            return NULL;
        }
    }
    PyObject *module = PyModule_Create(&definition);
    PyObject *slot = PyType_FromSpec(&slot_spec), *caller = PyType_FromSpec(&caller_spec);
    if (module == NULL || slot == NULL || caller == NULL || PyModule_AddObjectRef(module, "Slot", slot) != 0 ||
        PyModule_AddObjectRef(module, "Caller", caller) != 0) {
        Py_XDECREF(module);
        module = NULL;
    }
    Py_XDECREF(slot);
    Py_XDECREF(caller);
    return module;
}
