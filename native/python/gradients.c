/* gradients.c: the hook of a gradient, and the loops over gradients that travel together: little Python for each. */
#include "calls.h"

typedef struct {
    PyObject_HEAD
    PyObject *states; /* list */
    long long run, room;
    char overlaps;
} Ready;

typedef struct {
    PyObject_HEAD
    PyObject *parameter, *pending, *held, *held_at, *again, *group, *summed, *ready;
    long long weight;
    int64_t handle;
    char shares, was_unused;
} Gradient;

static PyObject *gradient_strided, *gradient_owners, *gradient_run; /* torch.strided, two functions */
static long long gradient_alone; /* the owners that the memory of a tensor has which is alone */

static struct {
    PyObject *grad, *version, *layout, *untyped_storage, *cdata, *admit, *submit, *submit_again;
} gradient_names;

static int is_none(const PyObject *object) {
    return object == NULL || object == Py_None;
}

/* Consumes `object`; -1: failed, with an exception. */
static long long number_in(PyObject *object) {
    long long number = object == NULL ? -1 : PyLong_AsLongLong(object);
    Py_XDECREF(object);
    return number;
}

/* Whether another tensor may have the memory of a gradient; -1: an exception. */
static int is_shared(PyObject *grad) {
    PyObject *layout = PyObject_GetAttr(grad, gradient_names.layout);
    Py_XDECREF(layout); /* torch has one object for each */
    if (layout != gradient_strided) {
        return layout == NULL ? -1 : 0;
    }
    if (gradient_owners == Py_None) {
        return 1;
    }
    PyObject *storage = PyObject_CallMethodObjArgs(grad, gradient_names.untyped_storage, NULL);
    PyObject *key = storage == NULL ? NULL : PyObject_GetAttr(storage, gradient_names.cdata);
    Py_XDECREF(storage);
    long long owners = key == NULL ? -1 : number_in(PyObject_CallFunctionObjArgs(gradient_owners, key, NULL));
    Py_XDECREF(key);
    return owners < 0 && PyErr_Occurred() ? -1 : owners > gradient_alone;
}

/* Notes a gradient as it is now; whether it went well. */
static int hold(Gradient *gradient, PyObject *grad) {
    PyObject *version = PyObject_GetAttr(grad, gradient_names.version);
    if (version == NULL) {
        return 0;
    }
    PyObject *before = gradient->held, *before_at = gradient->held_at;
    gradient->held = Py_NewRef(grad);
    gradient->held_at = version;
    Py_XDECREF(before);
    Py_XDECREF(before_at);
    return 1;
}

/* Whether a hook is to hold the gradient; -1: an exception. */
static int is_to_hold(Gradient *gradient, Ready *ready) {
    long long run = number_in(PyObject_CallFunctionObjArgs(gradient_run, NULL));
    if (PyErr_Occurred()) {
        return -1;
    }
    if (run == ready->run && is_none(gradient->held_at) && is_none(gradient->summed) && is_none(gradient->group)) {
        return ready->overlaps;
    }
    PyObject *answer =
        PyObject_CallMethodObjArgs((PyObject *)ready, gradient_names.admit, (PyObject *)gradient, NULL);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : answer == Py_True;
}

/* Holds the gradient of a parameter until there is a bucket of them; whether it went well. */
static int hold_ready(Gradient *gradient, Ready *ready, PyObject *grad) {
    int shares = is_shared(grad);
    if (shares != 0) { /* autograd may have other gradients in that memory that it will look at */
        return shares > 0;
    }
    gradient->shares = 0;
    if (!hold(gradient, grad) || PyList_Append(ready->states, (PyObject *)gradient) != 0) {
        return 0;
    }
    ready->room -= gradient->weight;
    PyObject *done = ready->room > 0 ? Py_NewRef(Py_None)
                                     : PyObject_CallMethodObjArgs((PyObject *)ready, gradient_names.submit, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

/* hook(parameter): autograd has accumulated its gradient. */
static PyObject *gradient_hook(PyObject *self, PyObject *parameter) {
    Gradient *gradient = (Gradient *)self;
    Ready *ready = (Ready *)Py_NewRef(gradient->ready);
    int is_done = is_to_hold(gradient, ready);
    if (is_done > 0) {
        PyObject *grad = PyObject_GetAttr(parameter, gradient_names.grad);
        is_done = grad == NULL ? -1 : (grad == Py_None || hold_ready(gradient, ready, grad)) - 1;
        Py_XDECREF(grad);
    }
    Py_DECREF(ready);
    return is_done < 0 ? NULL : Py_NewRef(Py_None);
}

/* bind(ready): where `hook` holds the gradient. */
static PyObject *gradient_bind(PyObject *self, PyObject *ready) {
    PyObject **place = &((Gradient *)self)->ready, *before = *place;
    *place = Py_NewRef(ready);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

/* Sets a gradient in the request that is kept for it, a new reference; None: it cannot be; NULL: an exception. */
static PyObject *take_gradient(Gradient *gradient, int sync) {
    PyObject *slot = Py_XNewRef(PyList_GetItem(gradient->again, sync)); /* modes of torch run code of Python below */
    PyObject *grad = is_none(gradient->held_at) ? PyObject_GetAttr(gradient->parameter, gradient_names.grad)
                                                : Py_XNewRef(gradient->held);
    if (is_none(slot) || is_none(grad)) {
        PyObject *answer = slot == NULL || grad == NULL ? NULL : Py_NewRef(Py_None);
        Py_XDECREF(slot);
        Py_XDECREF(grad);
        return answer;
    }
    PyObject *taken = hr_set_tensor((Slot *)slot, grad, 1, Py_None);
    if (taken != NULL && taken != Py_None) {
        gradient->was_unused = 0;
        if (is_none(gradient->held_at) && !hold(gradient, grad)) {
            Py_CLEAR(taken);
        }
    }
    Py_DECREF(slot);
    Py_DECREF(grad);
    return taken;
}

/* pick(gradients, sync, but): see calls.py. */
PyObject *hr_pick(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    PyObject *begun = PyList_New(0), *tensors = PyList_New(0), *others = PyList_New(0), *result = NULL;
    int is_done = begun != NULL && tensors != NULL && others != NULL;
    for (Py_ssize_t i = 0; is_done && i < PySequence_Size(given[0]); i++) {
        PyObject *item = PySequence_GetItem(given[0], i), *taken = NULL;
        Gradient *gradient = (Gradient *)item;
        if (item != NULL && is_none(gradient->pending)) {
            int may_fit = item != given[2] && !gradient->shares && is_none(gradient->group);
            taken = may_fit ? take_gradient(gradient, given[1] == Py_True) : Py_NewRef(Py_None);
            is_done = taken != NULL && (taken == Py_None ? PyList_Append(others, item) == 0
                                                         : PyList_Append(begun, item) == 0 &&
                                                               PyList_Append(tensors, taken) == 0);
        }
        is_done = is_done && item != NULL;
        Py_XDECREF(taken);
        Py_XDECREF(item);
    }
    if (is_done) {
        result = PyTuple_Pack(3, begun, tensors, others);
    }
    Py_XDECREF(begun);
    Py_XDECREF(tensors);
    Py_XDECREF(others);
    return result;
}

typedef struct {
    Gradient *gradient;
    Slot *slot;
} Job;

static void set_pending(Gradient *gradient, PyObject *pending) {
    PyObject *before = gradient->pending;
    gradient->pending = Py_NewRef(pending);
    Py_XDECREF(before);
}

/* Submits all from number `i` on, up to the first that is refused twice; whether there is none. */
static int submit_from(Caller *caller, const Job *jobs, Py_ssize_t i, Py_ssize_t count) {
    horo_context *context = *caller->context;
    Py_BEGIN_ALLOW_THREADS
    while (i < count && horo_submit(context, jobs[i].slot->request, &jobs[i].gradient->handle, NULL, 0) == HORO_OK) {
        i++;
    }
    Py_END_ALLOW_THREADS
    if (i == count) {
        return 1;
    }
    *jobs[i].slot->handle = 0;
    PyObject *self = (PyObject *)caller;
    PyObject *done = PyObject_CallMethodObjArgs(self, gradient_names.submit_again, (PyObject *)jobs[i].slot, NULL);
    jobs[i].gradient->handle = *jobs[i].slot->handle;
    Py_XDECREF(done);
    return done != NULL && submit_from(caller, jobs, i + 1, count);
}

/* submit_each(gradients, sync, pending) */
PyObject *hr_submit_each(PyObject *self, PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    Py_ssize_t count = PyList_Size(given[0]);
    Job *jobs = PyMem_Malloc((size_t)count * sizeof *jobs);
    if (jobs == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) { /* nothing here runs code of Python */
        Gradient *gradient = (Gradient *)PyList_GetItem(given[0], i);
        PyObject *slot = PyList_GetItem(gradient->again, given[1] == Py_True);
        jobs[i] = (Job){.gradient = (Gradient *)Py_NewRef((PyObject *)gradient), .slot = (Slot *)Py_NewRef(slot)};
        gradient->handle = 0;
        set_pending(gradient, given[2]);
    }
    int is_done = submit_from((Caller *)self, jobs, 0, count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (jobs[i].gradient->handle == 0) {
            set_pending(jobs[i].gradient, Py_None);
        }
        Py_DECREF((PyObject *)jobs[i].gradient);
        Py_DECREF((PyObject *)jobs[i].slot);
    }
    PyMem_Free(jobs);
    return is_done ? Py_NewRef(Py_None) : NULL;
}

/* finish_each(gradients, at) */
PyObject *hr_finish_each(PyObject *self, PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    horo_context *context = *((Caller *)self)->context;
    Py_ssize_t count = PyList_Size(given[0]), at = PyLong_AsSsize_t(given[1]);
    int64_t *handles = PyMem_Malloc((size_t)count * sizeof *handles);
    if (handles == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        handles[i] = ((Gradient *)PyList_GetItem(given[0], i))->handle;
    }
    Py_BEGIN_ALLOW_THREADS
    while (at < count && horo_finish(context, handles[at], SIGNAL_CHECK_MS, NULL, 0) == HORO_OK) {
        at++;
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(handles);
    return PyLong_FromSsize_t(at);
}

/* Whether a gradient is another one, or was not changed so many times; -1: an exception. */
static int is_changed(Gradient *gradient, long long times) {
    PyObject *version_held = Py_XNewRef(gradient->held_at);
    PyObject *grad = PyObject_GetAttr(gradient->parameter, gradient_names.grad);
    int is_so = grad == NULL ? -1 : is_none(version_held) || grad == Py_None || grad != gradient->held;
    if (is_so == 0) {
        long long version = number_in(PyObject_GetAttr(grad, gradient_names.version));
        PyObject *before = PyErr_Occurred() ? NULL : PyLong_FromLongLong(version - times);
        is_so = before == NULL ? -1 : PyObject_RichCompareBool(version_held, before, Py_NE);
        Py_XDECREF(before);
    }
    Py_XDECREF(grad);
    Py_XDECREF(version_held);
    return is_so;
}

/* changed(gradients, pending, times) */
PyObject *hr_changed(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    const long long times = PyLong_AsLongLong(given[2]);
    PyObject *found = PyErr_Occurred() ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_Size(given[0]); i++) {
        PyObject *item = Py_NewRef(PyList_GetItem(given[0], i)), *place = NULL;
        int is_so = ((Gradient *)item)->pending == given[1] ? is_changed((Gradient *)item, times) : 0;
        if (is_so < 0 || (is_so > 0 && ((place = PyLong_FromSsize_t(i)) == NULL || PyList_Append(found, place) != 0))) {
            Py_CLEAR(found);
        }
        Py_XDECREF(place);
        Py_DECREF(item);
    }
    return found;
}

/* is_shared(grad) */
PyObject *hr_is_shared(PyObject *Py_UNUSED(module), PyObject *grad) {
    int is_so = is_shared(grad);
    return is_so < 0 ? NULL : PyBool_FromLong(is_so);
}

/* note_sharing(gradients) */
PyObject *hr_note_sharing(PyObject *Py_UNUSED(module), PyObject *gradients) {
    int is_any = 0;
    for (Py_ssize_t i = 0; i < PySequence_Size(gradients); i++) {
        PyObject *item = PySequence_GetItem(gradients, i);
        Gradient *gradient = (Gradient *)item;
        if (item != NULL && is_none(gradient->pending)) {
            PyObject *grad = PyObject_GetAttr(gradient->parameter, gradient_names.grad);
            int is_so = is_none(grad) ? 0 : is_shared(grad);
            gradient->shares = is_so == 1;
            is_any |= is_so == 1;
            Py_XDECREF(grad);
        }
        Py_XDECREF(item);
        if (PyErr_Occurred()) {
            return NULL;
        }
    }
    return PyBool_FromLong(is_any);
}

/* know_gradients(strided, owners, alone, run) */
PyObject *hr_know_gradients(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t Py_UNUSED(count)) {
    gradient_alone = PyLong_AsLongLong(given[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    gradient_strided = Py_NewRef(given[0]);
    gradient_owners = Py_NewRef(given[1]);
    gradient_run = Py_NewRef(given[3]);
    return Py_NewRef(Py_None);
}

static int gradient_traverse(PyObject *self, visitproc visit, void *arg) {
    Gradient *gradient = (Gradient *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(gradient->parameter);
    Py_VISIT(gradient->pending);
    Py_VISIT(gradient->held);
    Py_VISIT(gradient->held_at);
    Py_VISIT(gradient->again);
    Py_VISIT(gradient->group);
    Py_VISIT(gradient->summed);
    Py_VISIT(gradient->ready);
    return 0;
}

static int gradient_clear(PyObject *self) {
    Gradient *gradient = (Gradient *)self;
    Py_CLEAR(gradient->parameter);
    Py_CLEAR(gradient->pending);
    Py_CLEAR(gradient->held);
    Py_CLEAR(gradient->held_at);
    Py_CLEAR(gradient->again);
    Py_CLEAR(gradient->group);
    Py_CLEAR(gradient->summed);
    Py_CLEAR(gradient->ready);
    return 0;
}

static void gradient_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    gradient_clear(self);
    hr_free_object(self);
}

static int ready_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Ready *)self)->states);
    return 0;
}

static int ready_clear(PyObject *self) {
    Py_CLEAR(((Ready *)self)->states);
    return 0;
}

static void ready_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    ready_clear(self);
    hr_free_object(self);
}

static PyMethodDef gradient_methods[] = {
    {"hook", gradient_hook, METH_O, NULL}, {"bind", gradient_bind, METH_O, NULL}, {NULL, NULL, 0, NULL},
};
static PyMemberDef gradient_members[] = {
    {"parameter", T_OBJECT, offsetof(Gradient, parameter), 0, NULL},
    {"pending", T_OBJECT, offsetof(Gradient, pending), 0, NULL},
    {"held", T_OBJECT, offsetof(Gradient, held), 0, NULL},
    {"held_at", T_OBJECT, offsetof(Gradient, held_at), 0, NULL},
    {"again", T_OBJECT, offsetof(Gradient, again), 0, NULL},
    {"group", T_OBJECT, offsetof(Gradient, group), 0, NULL},
    {"summed", T_OBJECT, offsetof(Gradient, summed), 0, NULL},
    {"weight", T_LONGLONG, offsetof(Gradient, weight), 0, NULL},
    {"handle", T_LONGLONG, offsetof(Gradient, handle), READONLY, NULL},
    {"shares", T_BOOL, offsetof(Gradient, shares), 0, NULL},
    {"was_unused", T_BOOL, offsetof(Gradient, was_unused), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot gradient_slots[] = {
    {Py_tp_methods, gradient_methods}, {Py_tp_members, gradient_members}, {Py_tp_dealloc, gradient_dealloc},
    {Py_tp_traverse, gradient_traverse}, {Py_tp_clear, gradient_clear}, {0, NULL},
};
static PyType_Spec gradient_spec = {
    "horo._calls.Gradient", sizeof(Gradient), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    gradient_slots,
};

static PyMemberDef ready_members[] = {
    {"states", T_OBJECT, offsetof(Ready, states), 0, NULL},
    {"run", T_LONGLONG, offsetof(Ready, run), 0, NULL},
    {"room", T_LONGLONG, offsetof(Ready, room), 0, NULL},
    {"overlaps", T_BOOL, offsetof(Ready, overlaps), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot ready_slots[] = {
    {Py_tp_members, ready_members}, {Py_tp_dealloc, ready_dealloc}, {Py_tp_traverse, ready_traverse},
    {Py_tp_clear, ready_clear}, {0, NULL},
};
static PyType_Spec ready_spec = {
    "horo._calls.Ready", sizeof(Ready), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, ready_slots,
};

int hr_add_gradients(PyObject *module) {
    int is_named =
        hr_intern(&gradient_names.grad, "grad") && hr_intern(&gradient_names.version, "_version") &&
        hr_intern(&gradient_names.layout, "layout") && hr_intern(&gradient_names.cdata, "_cdata") &&
        hr_intern(&gradient_names.untyped_storage, "untyped_storage") && hr_intern(&gradient_names.admit, "admit") &&
        hr_intern(&gradient_names.submit, "submit") && hr_intern(&gradient_names.submit_again, "submit_again");
    PyObject *gradient = PyType_FromSpec(&gradient_spec), *ready = PyType_FromSpec(&ready_spec);
    int is_done = is_named && gradient != NULL && ready != NULL &&
                  PyModule_AddObjectRef(module, "Gradient", gradient) == 0 &&
                  PyModule_AddObjectRef(module, "Ready", ready) == 0;
    Py_XDECREF(gradient);
    Py_XDECREF(ready);
    return is_done;
}
