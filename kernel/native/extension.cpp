// The extension: what Python sees of this folder's kernels, as operations of MLX's graph.
//
// Owns no arithmetic. Every operation is a Launch: outputs are allocated as MLX comes to it, and
// the work runs on its stream's thread, in the order of the graph. All arrays are float32 and stand
// row after row, but where a comment says so.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "attend.h"
#include "fetch.h"
#include "layer.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "products.h"
#include "scratch.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace mlxtape {

using Pointers = std::vector<char*>;
using Work = std::function<void(const Pointers& in, const Pointers& out)>;

class Launch : public mx::Primitive {
 public:
  Launch(mx::Stream stream, const char* name, Work work)
      : mx::Primitive(stream), name_(name), work_(std::move(work)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Pointers in, out;
    for (const mx::array& it : inputs) in.push_back(const_cast<char*>(it.data<char>()));
    for (mx::array& it : outputs) {
      it.set_data(mx::allocator::malloc(it.nbytes()));
      out.push_back(it.data<char>());
    }
    mx::cpu::get_command_encoder(stream()).dispatch(
        [work = work_, in = std::move(in), out = std::move(out)] { work(in, out); });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("kernels for the CPU were asked for on another device");
  }

  const char* name() const override { return name_; }

 private:
  const char* name_;
  Work work_;
};

float* floats(char* pointer) { return reinterpret_cast<float*>(pointer); }
int32_t* ints(char* pointer) { return reinterpret_cast<int32_t*>(pointer); }

std::vector<mx::array> launch(const char* name, std::vector<mx::array> inputs,
                              std::vector<mx::Shape> shapes, Work work) {
  mx::Stream stream = mx::default_stream(mx::Device(mx::Device::cpu));
  // Row after row; costs nothing where they stand so.
  for (mx::array& it : inputs) it = mx::contiguous(it, false, stream);
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  auto primitive = std::make_shared<Launch>(stream, name, std::move(work));
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

void check(const mx::array& array, mx::Dtype dtype, const char* what) {
  if (array.dtype() != dtype) throw std::invalid_argument(std::string(what) + " has another dtype");
}

void check_size(const mx::array& array, long size, const char* what) {
  if (static_cast<long>(array.size()) != size)
    throw std::invalid_argument(std::string(what) + " has another size");
}

// Weights [features, width] as products.h keeps them.
struct Weights {
  Form form;
  mx::array blob;  // bytes

  // kind: of Form. numbers: floats or bfloat-exact floats [features, width], or words of affine
  // ones, whose scales and biases are [features, width / group].
  static Weights pack(Form form, mx::array numbers, mx::array scales, mx::array biases) {
    if (!is_taken(form)) throw std::invalid_argument("weights of this shape are not multiplied");
    check(numbers, form.kind == kAffine ? mx::uint32 : mx::float32, "the numbers");
    for (mx::array* it : {&numbers, &scales, &biases}) *it = mx::contiguous(*it);
    mx::eval({numbers, scales, biases});
    // In lines: a dimension of an array has 31 bits.
    size_t lines = (packed_bytes(form, scales.data<float>(), biases.data<float>()) + 63) / 64;
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(64, lines * 64));
    if (memory == nullptr) throw std::bad_alloc();
    mlxtape::pack(form, numbers.data<char>(), scales.data<float>(), biases.data<float>(), memory);
    mx::Shape shape{static_cast<mx::ShapeElem>(lines), 64};
    return {form, mx::array(static_cast<void*>(memory), shape, mx::uint8, std::free)};
  }

  static Weights of_floats(const mx::array& numbers, bool narrow) {
    Form form{narrow ? kBfloat : kFloat, narrow ? 16 : 32, 0, numbers.shape(0), numbers.shape(1)};
    mx::array nothing = mx::zeros({1});
    return pack(form, numbers, nothing, nothing);
  }

  static Weights of_affine(const mx::array& words, const mx::array& scales, const mx::array& biases,
                           int bits, int group) {
    long width = static_cast<long>(words.shape(1)) * 32 / bits;
    for (const mx::array* it : {&scales, &biases}) {
      check(*it, mx::float32, "scales and biases");
      check_size(*it, words.shape(0) * width / group, "scales and biases");
    }
    return pack(Form{kAffine, bits, group, words.shape(0), width}, words, scales, biases);
  }
};

mx::ShapeElem rows_of(const mx::array& x, const Weights& weights) {
  check(x, mx::float32, "x");
  long rows = x.ndim() == 0 ? 0 : x.shape(0);
  if (static_cast<long>(x.size()) != rows * weights.form.width)
    throw std::invalid_argument("x is not as wide as the weights");
  return static_cast<mx::ShapeElem>(rows);
}

mx::array multiplied(const mx::array& x, const Weights& weights) {
  mx::ShapeElem rows = rows_of(x, weights), features = weights.form.features;
  Form form = weights.form;
  return launch("Multiplied", {x, weights.blob}, {{rows, features}},
                [form, rows](const Pointers& in, const Pointers& out) {
                  auto* blob = reinterpret_cast<uint8_t*>(in[1]);
                  product(form, blob, floats(in[0]), rows, floats(out[0]));
                })[0];
}

mx::array added(const mx::array& x, const Weights& weights, const mx::array& base) {
  mx::ShapeElem rows = rows_of(x, weights), features = weights.form.features;
  Form form = weights.form;
  check(base, mx::float32, "the base");
  check_size(base, static_cast<long>(rows) * features, "the base");
  return launch("Added", {x, weights.blob, base}, {{rows, features}},
                [form, rows](const Pointers& in, const Pointers& out) {
                  auto* blob = reinterpret_cast<uint8_t*>(in[1]);
                  product(form, blob, floats(in[0]), rows, floats(out[0]));
                  add(floats(in[2]), rows * form.features, floats(out[0]));
                })[0];
}

mx::array gated(const mx::array& x, const mx::array& norm, float eps, const Weights& weights) {
  mx::ShapeElem rows = rows_of(x, weights), features = weights.form.features;
  Form form = weights.form;
  check(norm, mx::float32, "the norm");
  check_size(norm, form.width, "the norm");
  return launch("Gated", {x, norm, weights.blob}, {{rows, features / 2}},
                [form, rows, eps](const Pointers& in, const Pointers& out) {
                  Scratch scratch;
                  float* normed = scratch.of<float>(rows * (form.width + form.features));
                  float* both = normed + rows * form.width;
                  auto* blob = reinterpret_cast<uint8_t*>(in[2]);
                  rms_norm(floats(in[0]), floats(in[1]), eps, rows, form.width, normed);
                  product(form, blob, normed, rows, both);
                  gate(both, rows, form.features / 2, floats(out[0]));
                })[0];
}

std::vector<mx::array> heads(const mx::array& x, const mx::array& norm, float eps,
                             const Weights& weights, const mx::array& positions,
                             const mx::array& rates, std::vector<int> counts, bool traditional) {
  mx::ShapeElem rows = rows_of(x, weights), dim = rates.size() * 2;
  Form form = weights.form;
  check(norm, mx::float32, "the norm");
  check_size(norm, form.width, "the norm");
  check(positions, mx::int32, "the positions");
  check_size(positions, rows, "the positions");
  if (counts.size() != 3 || (counts[0] + counts[1] + counts[2]) * long{dim} != form.features)
    throw std::invalid_argument("heads do not add up to the weights");
  std::vector<mx::Shape> shapes;
  for (int count : counts) shapes.push_back({rows, count, 1, dim});
  Turn turn{dim, traditional};
  return launch("Heads", {x, norm, weights.blob, positions, rates}, shapes,
                [=](const Pointers& in, const Pointers& out) {
                  Scratch scratch;
                  float* normed = scratch.of<float>(rows * (form.width + form.features));
                  float* all = normed + rows * form.width;
                  auto* blob = reinterpret_cast<uint8_t*>(in[2]);
                  rms_norm(floats(in[0]), floats(in[1]), eps, rows, form.width, normed);
                  product(form, blob, normed, rows, all);
                  const long sizes[] = {counts[0], counts[1], counts[2]};
                  float* parts[] = {floats(out[0]), floats(out[1]), floats(out[2])};
                  split(all, rows, sizes, ints(in[3]), floats(in[4]), turn, parts);
                });
}

// queries [T, H, ..., key dim]; the step's rows [T, KV, ..., dim]; sinks [H] or of no element.
mx::array attended(const mx::array& plan, int items, const mx::array& queries,
                   const mx::array& key_pages, const mx::array& value_pages, const mx::array& keys,
                   const mx::array& values, const mx::array& sinks, int shared, float scale) {
  for (const mx::array* it : {&queries, &key_pages, &value_pages, &keys, &values})
    check(*it, mx::float32, "what is attended over");
  check(plan, mx::int32, "the plan");
  Attend made{};
  made.items = items;
  made.block_size = key_pages.shape(1);
  made.kv_heads = key_pages.shape(2);
  made.key_dim = key_pages.shape(3);
  made.value_dim = value_pages.shape(3);
  made.shared = shared;
  made.scale = scale;
  mx::Shape shape = queries.shape();
  shape.back() = value_pages.shape(3);
  bool has_sinks = sinks.dtype() == mx::float32 && sinks.size() > 0;
  return launch("Attended", {plan, queries, key_pages, value_pages, keys, values, sinks}, {shape},
                [made, has_sinks](const Pointers& in, const Pointers& out) {
                  Attend it = made;
                  it.plan = ints(in[0]);
                  it.queries = floats(in[1]);
                  it.key_pages = floats(in[2]);
                  it.value_pages = floats(in[3]);
                  it.keys = floats(in[4]);
                  it.values = floats(in[5]);
                  it.sinks = has_sinks ? floats(in[6]) : nullptr;
                  it.out = floats(out[0]);
                  attend(it);
                })[0];
}

// K and V of `rows` rows, [KV, rows, dim] each; pages and the step's rows as above.
std::vector<mx::array> fetched(const mx::array& plan, int rows, const mx::array& key_pages,
                               const mx::array& value_pages, const mx::array& keys,
                               const mx::array& values) {
  for (const mx::array* it : {&key_pages, &value_pages, &keys, &values})
    check(*it, mx::float32, "what is fetched");
  check(plan, mx::int32, "the plan");
  long block_size = key_pages.shape(1), kv_heads = key_pages.shape(2);
  long dims[] = {key_pages.shape(3), value_pages.shape(3)};
  std::vector<mx::Shape> shapes;
  for (long dim : dims)
    shapes.push_back({key_pages.shape(2), rows, static_cast<mx::ShapeElem>(dim)});
  return launch("Fetched", {plan, key_pages, value_pages, keys, values}, shapes,
                [=](const Pointers& in, const Pointers& out) {
                  for (int i = 0; i < 2; i++)
                    fetch({ints(in[0]), floats(in[1 + i]), floats(in[3 + i]), floats(out[i]),
                           block_size, kv_heads, dims[i]});
                });
}

// The instructions by which many rows are multiplied with narrow weights: product_path's word.
std::string level() { return product_path(Form{kAffine, 4, 32, 64, 64}, 512); }

}  // namespace mlxtape

NB_MODULE(mlxtape_native, module) {
  using namespace mlxtape;
  nb::module_::import_("mlx.core");
  nb::class_<Weights>(module, "Weights")
      .def_static("of_floats", &Weights::of_floats)
      .def_static("of_affine", &Weights::of_affine)
      .def_prop_ro("features", [](const Weights& it) { return it.form.features; })
      .def_prop_ro("width", [](const Weights& it) { return it.form.width; })
      .def_prop_ro("nbytes", [](const Weights& it) { return it.blob.nbytes(); })
      .def("path", [](const Weights& it, long rows) { return product_path(it.form, rows); });
  module.def("multiplied", &multiplied);
  module.def("added", &added);
  module.def("gated", &gated);
  module.def("heads", &heads);
  module.def("attended", &attended);
  module.def("fetched", &fetched);
  module.def("level", &level);
  module.def("threads", [] { return Pool::shared().threads(); });
}
