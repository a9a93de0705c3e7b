// Extension module `feedline._native`: one bind_* function for each family of kernels.
#include <nanobind/nanobind.h>

#include "module.h"

NB_MODULE(_native, m) {
    // Recorders of threads and the sums of running loops exist until the interpreter ends.
    nanobind::set_leak_warnings(false);
    m.doc() = "Native kernels of feedline; use them through feedline.core.kernels, which checks arguments.";
    feedline::bind_permutation(m);
    feedline::bind_gather(m);
    feedline::bind_mixture(m);
#ifdef FEEDLINE_IMAGES
    feedline::bind_images(m);
    feedline::bind_grid(m);
#endif
    feedline::bind_color(m);
    feedline::bind_checksum(m);
    feedline::bind_run_lengths(m);
    feedline::bind_spans(m);
#ifdef FEEDLINE_RECORDER
    feedline::bind_recorder(m);
#endif
}
