#pragma once
#include <nanobind/nanobind.h>

namespace feedline {

void bind_permutation(nanobind::module_& m);
void bind_gather(nanobind::module_& m);

}  // namespace feedline
