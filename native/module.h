#pragma once
#include <nanobind/nanobind.h>

namespace feedline {

void bind_permutation(nanobind::module_& m);
void bind_gather(nanobind::module_& m);
void bind_mixture(nanobind::module_& m);
void bind_images(nanobind::module_& m);
void bind_grid(nanobind::module_& m);
void bind_color(nanobind::module_& m);
void bind_checksum(nanobind::module_& m);
void bind_run_lengths(nanobind::module_& m);
void bind_recorder(nanobind::module_& m);
void bind_spans(nanobind::module_& m);

}  // namespace feedline
