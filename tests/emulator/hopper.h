// What wide.h takes from Hopper. Copies and products are done as late as a GPU may do them, when they
// are waited for, and what a copy goes to is spoilt at once. That copies are shown to the products
// (a fence) is not looked at.
#pragma once
struct Copy { char* to; const void* from; bool there; };
struct Product { float* d; int columns; const void *a, *b; float (*number)(const void*, int, int); };
// What a thread of a block asked for and did not wait for; the last of each is not ended.
struct Asked {
  long block = -1;
  std::vector<std::vector<Copy>> copies;
  std::vector<std::vector<Product>> products;
};
alignas(1024) static char room[232448];
static std::vector<Asked> threads;
inline Asked& asked() {
  threads.resize(emulator::fibers.size());
  auto& mine = threads[emulator::current];
  if (mine.block != emulator::blocks) mine = {emulator::blocks, {{}}, {{}}};
  return mine;
}
inline void* shared_room() { return room; }
inline void copy16(void* to, const void* from, bool there) {
  emulator::aligned(to, 16);
  emulator::aligned(from, 16);
  std::memset(to, 0xff, 16);
  asked().copies.back().push_back({static_cast<char*>(to), from, there});
}
inline void end_copies() { asked().copies.emplace_back(); }
template <int LEFT> inline void wait_copies() {
  auto& groups = asked().copies;
  for (; groups.size() > LEFT + 1; groups.erase(groups.begin()))
    for (auto& it : groups[0])
      if (it.there) std::memcpy(it.to, it.from, 16); else std::memset(it.to, 0, 16);
}
inline void show_copies() {}
inline void begin_products() {}
template <typename T> inline float shared_number(const void* base, int row, int k) {
  auto at = reinterpret_cast<std::uintptr_t>(base) + row * 128 + k * 2;
  return *reinterpret_cast<T*>(at ^ (at >> 7 & 7) << 4);
}
template <int N, typename T> inline void multiply64(float (&d)[N], const T* a, const T* b) {
  asked().products.back().push_back({d, N * 2, a, b, shared_number<T>});
}
inline void end_products() { asked().products.emplace_back(); }
inline void wait_products() {
  int thread = emulator::current % 128, lane = thread % 32;
  auto& groups = asked().products;
  for (; groups.size() > 1; groups.erase(groups.begin()))
    for (auto& it : groups[0])
      for (int i = 0; i < it.columns / 2; ++i) {
        int row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
        int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
          it.d[i] += it.number(it.a, row, k) * it.number(it.b, column, k);
      }
}
