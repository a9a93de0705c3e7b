#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

namespace feedline {

// Memory of a NumPy array or another object with the buffer protocol, referenced until this object is destroyed.
//
// Used instead of nanobind's ndarray because it takes a tenth of a microsecond and accepts read-only memory.
class Buffer {
public:
    explicit Buffer(nanobind::handle array, bool writable = false) {
        const int flags = PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(array.ptr(), &view_, flags)) nanobind::raise_python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    char* data() const { return static_cast<char*>(view_.buf); }
    int ndim() const { return view_.ndim; }
    std::int64_t item_nbytes() const { return view_.itemsize; }
    std::int64_t shape(int axis) const { return view_.shape[axis]; }
    std::int64_t stride(int axis) const { return view_.strides[axis]; }

    // Bytes of one row (all axes but the first), or -1 if rows are not contiguous.
    std::int64_t row_nbytes() const {
        std::int64_t nbytes = view_.itemsize;
        for (int axis = view_.ndim - 1; axis > 0; axis--) {
            if (view_.shape[axis] != 1 && view_.strides[axis] != nbytes) return -1;
            nbytes *= view_.shape[axis];
        }
        return nbytes;
    }

    // Numbers of one contiguous axis of int64; raises TypeError for anything else.
    std::int64_t* int64_items() const {
        if (!has_items(8)) throw nanobind::type_error("expected one axis of int64 without gaps");
        return static_cast<std::int64_t*>(view_.buf);
    }

    // The same for int32.
    std::int32_t* int32_items() const {
        if (!has_items(4)) throw nanobind::type_error("expected one axis of int32 without gaps");
        return static_cast<std::int32_t*>(view_.buf);
    }

private:
    bool has_items(std::int64_t nbytes) const {
        return view_.ndim == 1 && view_.itemsize == nbytes && (view_.shape[0] <= 1 || view_.strides[0] == nbytes);
    }

    Py_buffer view_;
};

}  // namespace feedline
