// Buffers and copies through an Ops' own space, so that a test runs on the CPU and on a separate memory space alike.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "runtime/ops.h"
#include "support/oracle.h"

namespace firn::test {

inline void must_ok(const Status& status) { FIRN_CHECK(status.ok(), status.message()); }
template <typename T>
T must_have(Result<T> result) {
  must_ok(result.status());
  return std::move(result).value();
}

// One matrix in an Ops' space.
struct DeviceMatrix {
  Buffer buffer;
  MatrixView view;
};

class Device {
 public:
  explicit Device(Ops* ops) : ops_(ops) {}
  Ops& ops() { return *ops_; }

  Buffer buffer(int64_t bytes) { return must_have(ops_->arena().allocate(bytes, "test")); }
  DeviceMatrix matrix(DType dtype, int64_t rows, int64_t cols) {
    DeviceMatrix m;
    m.buffer = buffer(std::max<int64_t>(1, rows * cols * static_cast<int64_t>(dtype_bytes(dtype))));
    m.view = {m.buffer.data(), dtype, rows, cols, cols, ops_->space()};
    return m;
  }
  void upload(void* dst, const void* src, int64_t bytes) { must_ok(ops_->wait(ops_->upload(dst, src, bytes))); }
  DeviceMatrix put(const void* data, DType dtype, int64_t rows, int64_t cols) {
    DeviceMatrix m = matrix(dtype, rows, cols);
    upload(m.view.data, data, m.buffer.bytes());
    return m;
  }
  template <typename T>
  std::vector<T> get(const ConstMatrixView& m) {
    FIRN_CHECK(m.stride == m.cols && sizeof(T) == dtype_bytes(m.dtype), "get: a packed matrix of this type expected");
    std::vector<T> out(static_cast<size_t>(m.rows * m.cols));
    must_ok(ops_->wait(ops_->download(out.data(), m.data, static_cast<int64_t>(out.size() * sizeof(T)))));
    return out;
  }

 private:
  Ops* ops_;
};

// KV and index blocks of one sequence, and its table.
class DeviceKv {
 public:
  DeviceKv(Device& device, const KvLayout& layout, int64_t n_tokens) : layout_(layout) {
    stride_ = (n_tokens + layout.block_tokens - 1) / layout.block_tokens;
    for (int64_t i = 0; i < layout.groups * stride_; ++i) {
      blocks_.push_back(device.buffer(layout.kv_block_bytes()));
      kv_.push_back(blocks_.back().data());
    }
    for (int64_t i = 0; layout.index_dim > 0 && i < stride_; ++i) {
      blocks_.push_back(device.buffer(layout.index_block_bytes()));
      index_.push_back(blocks_.back().data());
    }
  }
  KvSpan span(int64_t row_begin, int64_t n_rows, int64_t pos_begin) const {
    return {row_begin, n_rows, pos_begin, kv_.data(), index_.empty() ? nullptr : index_.data(), stride_};
  }
  const KvLayout& layout() const { return layout_; }
  void* kv(int64_t group, int64_t block) const { return kv_[static_cast<size_t>(group * stride_ + block)]; }
  void* index(int64_t block) const { return index_[static_cast<size_t>(block)]; }

 private:
  KvLayout layout_;
  int64_t stride_ = 0;
  std::vector<Buffer> blocks_;
  std::vector<void*> kv_, index_;
};

}  // namespace firn::test
