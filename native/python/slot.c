/* slot.c: tensors of torch as the core takes them, if they look as those of the last call did. */
#include "calls.h"

static PyObject *slot_tensor_type;
static PyObject *slot_forward_mode; /* has _current_level, not negative while tensors may have tangents */
static dlpack_reader *slot_reader;

static struct {
    PyObject *current_level;
    PyObject *requires_grad, *is_neg, *untyped_storage, *storage_offset, *data_ptr, *address, *new_output;
} slot_names;

void hr_know_tensors(PyObject *type, dlpack_reader *read, PyObject *forward_mode) {
    slot_tensor_type = Py_NewRef(type);
    slot_forward_mode = Py_NewRef(forward_mode);
    slot_reader = read;
}

static int is_dense(const dlpack_tensor *tensor) {
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
static int read_tensor(PyObject *object, dlpack_tensor *tensor) {
    if ((PyObject *)Py_TYPE(object) != slot_tensor_type) {
        return 0;
    }
    if (slot_reader(object, tensor) != 0) { /* no code of Python has run: no exception of a signal handler is lost */
        PyErr_Clear();
        return 0;
    }
    return tensor->device.type == DLPACK_CPU && tensor->data != NULL && tensor->byte_offset == 0 && is_dense(tensor);
}

/* Calls a method of a tensor that has a number; -1: failed, with an exception. */
static long long number_of(PyObject *tensor, PyObject *method) {
    PyObject *found = PyObject_CallMethodObjArgs(tensor, method, NULL);
    long long number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

/*
 * Whether a tensor is what DLPack does not tell: without a graph or tangent, not negated lazily, its storage not cut
 * off. Modes of torch run code of Python here, and with it signal handlers: 0 may come with an exception, which is the
 * caller's.
 */
static int is_plain(PyObject *object, dlpack_dtype dtype, int64_t bytes) {
    PyObject *level = PyObject_GetAttr(slot_forward_mode, slot_names.current_level);
    int has_no_tangent = level != NULL && PyLong_AsLong(level) < 0;
    Py_XDECREF(level);
    if (!has_no_tangent) {
        return 0;
    }
    PyObject *requires_grad = PyObject_GetAttr(object, slot_names.requires_grad);
    int is_so = requires_grad == Py_False && number_of(object, slot_names.is_neg) == 0;
    Py_XDECREF(requires_grad);
    PyObject *storage = is_so ? PyObject_CallMethodObjArgs(object, slot_names.untyped_storage, NULL) : NULL;
    if (storage == NULL) {
        return 0;
    }
    int64_t offset = number_of(object, slot_names.storage_offset);
    if (offset >= 0) {
        offset *= (dtype.bits * dtype.lanes + 7) / 8;
    }
    is_so = offset >= 0 && PyObject_Size(storage) >= offset + bytes;
    Py_DECREF(storage);
    return is_so;
}

/* The address of a tensor (or of the memory for a result) that looks as the slot knows it, else NULL. */
static char *address_in(const Slot *slot, PyObject *object, int is_out) {
    if (slot_reader == NULL) {
        PyObject *found = PyObject_CallMethodObjArgs((PyObject *)slot, slot_names.address, object,
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

PyObject *hr_set_tensor(Slot *slot, PyObject *tensor, int in_place, PyObject *out) {
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
        result = PyObject_CallMethodObjArgs((PyObject *)slot, slot_names.new_output, tensor, NULL);
        to = result == NULL ? NULL : (char *)number_of(result, slot_names.data_ptr);
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

static PyObject *slot_set_tensor(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    return hr_set_tensor((Slot *)self, given[0], given[1] == Py_True, count > 2 ? given[2] : Py_None);
}

/* learn(tensor, result, bytes, bytes of the result): gets ready for a tensor that looks like this one. */
static PyObject *slot_learn(PyObject *self, PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    Slot *slot = (Slot *)self;
    dlpack_tensor tensor, out;
    slot->is_ready = 0;
    slot->bytes = PyLong_AsLongLong(given[2]);
    slot->out_bytes = PyLong_AsLongLong(given[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (slot_reader == NULL) {
        slot->is_ready = 1;
    } else if (read_tensor(given[0], &tensor) && slot_reader(given[1], &out) == 0 && out.ndim <= OUT_DIMS_MAX) {
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

/* bind(request, handle, numbers, number_at): addresses in memory that lives as long as this object. */
static PyObject *slot_bind(PyObject *self, PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    Slot *slot = (Slot *)self;
    slot->request = PyLong_AsVoidPtr(given[0]);
    slot->handle = PyLong_AsVoidPtr(given[1]);
    slot->numbers = given[2] == Py_None ? NULL : (Numbers *)Py_NewRef(given[2]);
    slot->number_at = PyLong_AsSsize_t(given[3]);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *slot_take(PyObject *self, PyObject *Py_UNUSED(none)) {
    Slot *slot = (Slot *)self;
    PyObject *was_free = slot->is_taken ? Py_False : Py_True;
    slot->is_taken = 1;
    return Py_NewRef(was_free);
}

static void slot_dealloc(PyObject *self) {
    Py_CLEAR(((Slot *)self)->key);
    Py_XDECREF((PyObject *)((Slot *)self)->numbers);
    hr_free_object(self);
}

/* take(): the next number. */
static PyObject *numbers_take(PyObject *self, PyObject *Py_UNUSED(none)) {
    return PyLong_FromLongLong(((Numbers *)self)->next++);
}

static PyMethodDef numbers_methods[] = {{"take", numbers_take, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyMemberDef numbers_members[] = {
    {"next", T_LONGLONG, offsetof(Numbers, next), 0, NULL}, {NULL, 0, 0, 0, NULL},
};
static PyType_Slot numbers_slots[] = {
    {Py_tp_methods, numbers_methods}, {Py_tp_members, numbers_members}, {Py_tp_dealloc, hr_free_object}, {0, NULL},
};
static PyType_Spec numbers_spec = {
    "horo._calls.Numbers", sizeof(Numbers), 0, Py_TPFLAGS_DEFAULT, numbers_slots,
};

PyObject *hr_make_numbers_type(void) {
    return PyType_FromSpec(&numbers_spec);
}

static PyMethodDef slot_methods[] = {
    {"set_tensor", HR_FAST(slot_set_tensor), METH_FASTCALL, NULL},
    {"learn", HR_FAST(slot_learn), METH_FASTCALL, NULL},
    {"bind", HR_FAST(slot_bind), METH_FASTCALL, NULL},
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

PyObject *hr_make_slot_type(void) {
    int is_named = hr_intern(&slot_names.current_level, "_current_level") &&
                   hr_intern(&slot_names.requires_grad, "requires_grad") && hr_intern(&slot_names.is_neg, "is_neg") &&
                   hr_intern(&slot_names.untyped_storage, "untyped_storage") &&
                   hr_intern(&slot_names.storage_offset, "storage_offset") &&
                   hr_intern(&slot_names.address, "address") && hr_intern(&slot_names.data_ptr, "data_ptr") &&
                   hr_intern(&slot_names.new_output, "new_output");
    return is_named ? PyType_FromSpec(&slot_spec) : NULL;
}
