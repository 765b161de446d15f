// Scratch: memory for what a kernel keeps for itself.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace mlxtape {

// Grown when more is asked for, never shrunk: one that a thread keeps spares it the system's pages
// in each call, and one of a launch gives them back at its end. Begins at a page, so at a vector.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // `count` numbers, of any values.
  template <class T>
  T* of(size_t count) {
    if (count * sizeof(T) > size_) grow(count * sizeof(T));
    return static_cast<T*>(data_);
  }

 private:
  static constexpr size_t kPage = 4096;

  void grow(size_t wanted) {
    std::free(data_);
    size_ = 0;
    wanted = (wanted + kPage - 1) / kPage * kPage;
    data_ = std::aligned_alloc(kPage, wanted);
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = wanted;
  }

  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace mlxtape
