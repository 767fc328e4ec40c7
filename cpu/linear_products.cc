// Cutting products into pieces. Cuts that show in the bits depend on shapes alone; only kTiles, whose outputs are each
// one chain whatever the cut, sizes its pieces by the team.
#include "cpu/linear_products.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "cpu/amx_gemm.h"
#include "cpu/bf16_dot.h"

namespace firn::cpu {
namespace {

constexpr int64_t kDotPieceBytes = int64_t{256} << 10;  // weights of one piece: a few microseconds of memory reads
constexpr int64_t kDotManyRows = 24;                    // a multiple of dot_many's 6; f32 tile of 0.6 MB at 6144 inputs
constexpr int64_t kChunkRows = 1024;                    // input rows of one gemm or dot_many piece
constexpr int64_t kGatedChunkRows = 256;                // input rows whose gate and up are kept before the activation

int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

struct ScaleTables {
  std::array<float, 256> e8m0, e4m3;
  ScaleTables() {
    for (int i = 0; i < 256; ++i) {
      e8m0[static_cast<size_t>(i)] = e8m0_to_float(static_cast<uint8_t>(i));
      e4m3[static_cast<size_t>(i)] = e4m3_to_float(static_cast<uint8_t>(i));
    }
  }
};

const float* scale_table(WeightFormat format) {
  static const ScaleTables tables;
  return format == WeightFormat::kNvfp4 ? tables.e4m3.data() : tables.e8m0.data();
}

WeightRows weight_rows(const WeightView& w, int64_t first, int64_t n) {
  const int64_t row_bytes = weight_data_bytes(w.format, 1, w.cols);
  const int64_t scale_bytes = weight_scale_bytes(w.format, 1, w.cols);
  // Formats without scales get a pointer they may do arithmetic on; nothing reads it.
  const auto* scales = static_cast<const uint8_t*>(w.scales != nullptr ? w.scales : w.data);
  return {static_cast<const uint8_t*>(w.data) + first * row_bytes,
          scales + first * scale_bytes,
          row_bytes,
          scale_bytes,
          n,
          w.cols,
          scale_table(w.format)};
}

float out_scale(const WeightView& w) { return kUnit[static_cast<int>(w.format)] * w.tensor_scale; }

// Weight rows whose stored form oneDNN can read as it lies.
bool stored_as_gemm(const WeightView& w, GemmType type) {
  return type == GemmType::kBf16 ? w.format == WeightFormat::kBf16 : w.format == WeightFormat::kF32;
}

bool stored_pair(const GatedProduct& g) {
  return stored_as_gemm(g.gate.w, g.gate.type) && stored_as_gemm(g.up, g.gate.type);
}

// Row stride of a dequantised tile: rows of a multiple of 4 KiB would all fall into the same sets of the caches.
int64_t tile_stride(int64_t k) { return round_up(k, kXPad) + kXPad; }

int64_t element_bytes(GemmType type) { return type == GemmType::kBf16 ? 2 : 4; }

int64_t dot_piece_rows(const WeightView& w, int64_t most) {
  const int64_t row_bytes = std::max<int64_t>(1, weight_data_bytes(w.format, 1, w.cols));
  return std::clamp<int64_t>(kDotPieceBytes / row_bytes / 4 * 4, 4, most);
}

bool is_fp4(WeightFormat format) { return format == WeightFormat::kNvfp4 || format == WeightFormat::kMxfp4; }

int64_t row_bytes_of(const WeightView& w) {
  return weight_data_bytes(w.format, 1, w.cols) + weight_scale_bytes(w.format, 1, w.cols);
}

// Input rows of one chunk on matrix tiles: packed, they share a second-level cache of 2 MiB with the weights on their
// way. Chunks of one product are of nearly one size.
constexpr int64_t kTileChunkRows = 256;
int64_t tile_chunk_rows(int64_t rows, int64_t k) {
  const int64_t most =
      std::clamp<int64_t>((int64_t{1536} << 10) / (2 * k) / kAmxRows * kAmxRows, 2 * kAmxRows, kTileChunkRows);
  const int64_t chunks = (rows + most - 1) / most;
  return round_up((rows + chunks - 1) / chunks, kAmxRows);
}

// Weights of a piece on matrix tiles: some pieces a thread, so that all end together, none too small for its start.
int64_t tile_piece_bytes(int64_t call_bytes, int64_t n_threads) {
  return std::clamp<int64_t>(call_bytes / (n_threads * 16), int64_t{128} << 10, int64_t{1} << 20);
}

// Output rows and input rows of the pieces a product is cut into.
struct Cut {
  int64_t first = 0;  // number of its first piece
  int64_t outs = 0, rows = 0;
  int64_t tile = 0, tiles = 0, chunk = 0, chunks = 0;
  bool by_chunk = false;  // all tiles of a chunk before the next chunk
};

// piece_bytes is kTiles' size of a piece.
Cut cut_product(const Product& p, int64_t piece_bytes, int64_t first) {
  Cut c;
  c.first = first;
  c.outs = p.w.rows;
  c.rows = p.rows;
  if (p.rows == 0 || p.w.rows == 0) return c;
  switch (p.path) {
    case LinearPath::kDot:
    case LinearPath::kBf16Dot:
      c.tile = dot_piece_rows(p.w, 1024);
      c.chunk = p.rows;
      break;
    case LinearPath::kDotMany:
      c.tile = kDotManyRows;
      c.chunk = kChunkRows;
      break;
    case LinearPath::kGemm:
      c.tile = gemm_tile_rows(p.type, p.w.cols);
      // A last chunk of fewer than kMinGemmRows rows goes with the one before it.
      c.chunk = kChunkRows;
      break;
    case LinearPath::kTiles:
      c.tile = std::clamp<int64_t>(piece_bytes / row_bytes_of(p.w) / 32 * 32, 32, 512);
      c.chunk = tile_chunk_rows(p.rows, p.w.cols);
      c.by_chunk = true;
      break;
  }
  c.tiles = (p.w.rows + c.tile - 1) / c.tile;
  c.chunks = std::max<int64_t>(
      1, p.path == LinearPath::kGemm ? (p.rows - kMinGemmRows) / c.chunk + 1 : (p.rows + c.chunk - 1) / c.chunk);
  return c;
}

struct Piece {
  size_t product;
  int64_t out_begin, out_n;  // weight rows
  int64_t row_begin, row_n;  // input rows
};

// Pieces of one product follow each other by tile, then by chunk, so that a thread walks weights in order; on matrix
// tiles by chunk, then by tile, so that its inputs stay.
class Cuts {
 public:
  explicit Cuts(std::vector<Cut> cuts) : cuts_(std::move(cuts)) {
    for (const Cut& c : cuts_) n_ += c.tiles * c.chunks;
  }
  int64_t size() const { return n_; }
  const Cut& at(size_t product) const { return cuts_[product]; }
  Piece piece(int64_t i) const {
    const auto it =
        std::upper_bound(cuts_.begin(), cuts_.end(), i, [](int64_t v, const Cut& c) { return v < c.first; });
    const Cut& c = *(it - 1);
    const int64_t at = i - c.first;
    const int64_t tile = c.by_chunk ? at % c.tiles : at / c.chunks, chunk = c.by_chunk ? at / c.tiles : at % c.chunks;
    const int64_t row_begin = chunk * c.chunk;
    return {static_cast<size_t>(it - 1 - cuts_.begin()), tile * c.tile, std::min(c.tile, c.outs - tile * c.tile),
            row_begin, (chunk + 1 == c.chunks ? c.rows : row_begin + c.chunk) - row_begin};
  }

 private:
  std::vector<Cut> cuts_;
  int64_t n_ = 0;
};

// Compiled products of a call, found before the parallel region and looked up inside it without locks.
class Gemms {
 public:
  explicit Gemms(GemmCache* cache) : cache_(cache) {}
  Status need(const GemmShape& shape) {
    if (found_.contains(shape)) return {};
    FIRN_ASSIGN(auto kernel, cache_->find(shape));
    scratchpad_bytes_ = std::max(scratchpad_bytes_, kernel->scratchpad_bytes());
    found_.emplace(shape, std::move(kernel));
    return {};
  }
  const GemmKernel& at(const GemmShape& shape) const { return *found_.find(shape)->second; }
  int64_t scratchpad_bytes() const { return scratchpad_bytes_; }

 private:
  GemmCache* const cache_;
  std::map<GemmShape, std::shared_ptr<const GemmKernel>> found_;
  int64_t scratchpad_bytes_ = 0;
};

GemmShape gemm_shape(const Product& p, int64_t rows, int64_t outs, bool stored, int64_t ldc) {
  return {p.type, rows, outs, p.w.cols, p.x_stride, stored ? p.w.cols : tile_stride(p.w.cols), ldc};
}

// Needs a kernel for every piece size of `p`.
Status need_gemms(Gemms& gemms, const Product& p, const Cut& c, bool stored, int64_t halves, int64_t chunk,
                  int64_t ldc) {
  for (const int64_t outs : {std::min(c.tile, p.w.rows), p.w.rows - (c.tiles - 1) * c.tile}) {
    for (int64_t begin = 0; begin < p.rows;) {
      const int64_t left = p.rows - begin;
      const int64_t n = left < chunk + kMinGemmRows ? left : chunk;
      for (const RowPiece& piece : row_pieces(n)) {
        FIRN_TRY(gemms.need(gemm_shape(p, piece.rows, stored ? outs : outs * halves, stored, ldc)));
      }
      begin += n;
    }
  }
  return {};
}

const void* x_at(const Product& p, int64_t row) {
  return p.type == GemmType::kBf16 && p.x_bf16 != nullptr ? static_cast<const void*>(p.x_bf16 + row * p.x_stride)
                                                          : static_cast<const void*>(p.x_f32 + row * p.x_stride);
}

void dequantise(const LinearKernels& kernels, const WeightView& w, int64_t begin, int64_t n, GemmType type, void* out,
                int64_t stride) {
  const auto format = static_cast<size_t>(w.format);
  const DequantiseArgs args = {weight_rows(w, begin, n), out, stride};
  (type == GemmType::kBf16 ? kernels.dequantise_bf16[format] : kernels.dequantise_f32[format])(args);
}

// The weight rows [begin, begin + n) as oneDNN reads them: in place, or dequantised into `tile`.
const void* gemm_weights(const LinearKernels& kernels, const Product& p, bool stored, int64_t begin, int64_t n,
                         std::byte* tile) {
  if (stored) return weight_rows(p.w, begin, n).data;
  dequantise(kernels, p.w, begin, n, p.type, tile, tile_stride(p.w.cols));
  return tile;
}

int64_t tile_bytes(const Product& p, const Cut& c, bool stored, int64_t halves) {
  if (p.path == LinearPath::kDot || p.path == LinearPath::kBf16Dot || c.tiles == 0) return 0;
  if (p.path == LinearPath::kTiles) return amx_scratch_bytes(c.chunk);
  if (p.path == LinearPath::kDotMany) return halves * c.tile * round_up(p.w.cols, kXPad) * 4;
  if (stored) return 0;
  return halves * c.tile * tile_stride(p.w.cols) * element_bytes(p.type);
}

// Scratch of every thread, laid end to end.
class ThreadScratch {
 public:
  // `shared` bytes for all threads lie before it.
  ThreadScratch(const LinearContext& context, int64_t shared, int64_t tile, int64_t values, int64_t pad)
      : tile_(round_up(tile, 4096)), values_(round_up(values * 4, 4096)), pad_(round_up(pad, 4096)) {
    each_ = tile_ + values_ + pad_;
    const int64_t total = round_up(shared, 4096) + each_ * context.team->size();
    shared_ = total == 0 ? nullptr : context.scratch(total);
    ok_ = total == 0 || shared_ != nullptr;
    base_ = ok_ ? shared_ + round_up(shared, 4096) : nullptr;
  }
  bool ok() const { return ok_; }
  std::byte* shared() const { return shared_; }
  std::byte* tile(int thread) const { return base_ + thread * each_; }
  float* values(int thread) const { return reinterpret_cast<float*>(base_ + thread * each_ + tile_); }
  std::byte* pad(int thread) const { return base_ + thread * each_ + tile_ + values_; }

 private:
  int64_t tile_, values_, pad_, each_ = 0;
  std::byte* shared_ = nullptr;
  std::byte* base_ = nullptr;
  bool ok_ = false;
};

// Inputs in the form that kernels of bf16 rows read them in, each made once however many products read it.
class PackedInputs {
 public:
  void need(const Product& p) {
    if (!packed(p) || find(p) != nullptr) return;
    const int64_t bytes =
        p.path == LinearPath::kTiles ? amx_packed_bytes(p.rows, p.w.cols) : p.rows * round_up(p.w.cols, kXPad) * 2;
    inputs_.push_back({p.x_bf16, p.x_stride, p.rows, p.w.cols, p.path, is_fp4(p.w.format), bytes_});
    bytes_ += round_up(bytes, 64);
  }
  int64_t bytes() const { return bytes_; }
  void pack(ThreadTeam* team, std::byte* memory) {
    memory_ = memory;
    for (const Input& in : inputs_) {
      if (in.path == LinearPath::kBf16Dot) {
        const int64_t stride = round_up(in.k, kXPad);
        for (int64_t r = 0; r < in.rows; ++r) {
          bf16_dot_kernels().order_fp4(in.x + r * in.stride, in.k,
                                       reinterpret_cast<uint16_t*>(memory + in.at) + r * stride);
        }
        continue;
      }
      team->parallel_for(in.rows, kAmxRows, [&](int64_t begin, int64_t end, int) {
        amx_kernels().pack_x(in.x + begin * in.stride, in.stride, end - begin, in.k, amx_columns(in.rows), in.fp4,
                             memory + in.at + begin * in.k * 2);
      });
    }
  }
  // `row` is a multiple of kAmxRows.
  const void* tiles(const Product& p, int64_t row) const { return memory_ + find(p)->at + row * p.w.cols * 2; }
  Bf16DotArgs dot(const Product& p) const {
    Bf16DotArgs a;
    a.x = packed(p) ? reinterpret_cast<const uint16_t*>(memory_ + find(p)->at) : p.x_bf16;
    a.x_stride = packed(p) ? round_up(p.w.cols, kXPad) : p.x_stride;
    a.n_x = p.rows;
    return a;
  }

 private:
  struct Input {
    const uint16_t* x;
    int64_t stride, rows, k;
    LinearPath path;
    bool fp4;
    int64_t at;
  };
  static bool packed(const Product& p) {
    return p.path == LinearPath::kTiles || (p.path == LinearPath::kBf16Dot && is_fp4(p.w.format));
  }
  const Input* find(const Product& p) const {
    for (const Input& in : inputs_) {
      if (in.x == p.x_bf16 && in.stride == p.x_stride && in.rows == p.rows && in.k == p.w.cols && in.path == p.path &&
          in.fp4 == is_fp4(p.w.format)) {
        return &in;
      }
    }
    return nullptr;
  }
  std::vector<Input> inputs_;
  int64_t bytes_ = 0;
  std::byte* memory_ = nullptr;
};

// As ThreadTeam::parallel_for with a grain of one, but body(i, then, thread) also learns which piece its thread takes
// after this one (n or more: none).
template <typename F>
void for_pieces(ThreadTeam* team, int64_t n, F&& body) {
  if (n <= 1 || team->size() == 1) {
    for (int64_t i = 0; i < n; ++i) body(i, i + 1, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  team->run([&](int thread, int) {
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < n;) {
      const int64_t then = next.fetch_add(1, std::memory_order_relaxed);
      body(i, then, thread);
      i = then;
    }
  });
}

// The part of a call on matrix tiles that is the same for one matrix and for two.
AmxGemmArgs tile_args(const Product& p, const PackedInputs& packed, const Piece& piece, std::byte* scratch) {
  AmxGemmArgs a;
  a.x = packed.tiles(p, piece.row_begin);
  a.columns = amx_columns(p.rows);
  a.m = piece.row_n;
  a.k = p.w.cols;
  a.scratch = scratch;
  return a;
}

AmxWeights tile_weights(const WeightView& w, const Piece& piece, float factor, float* out) {
  return {weight_rows(w, piece.out_begin, piece.out_n), static_cast<int>(w.format), factor, out};
}

void ask_for(AmxGemmArgs& a, int j, const WeightView& w, const Piece& piece) {
  const WeightRows rows = weight_rows(w, piece.out_begin, piece.out_n);
  a.next_data[j] = rows.data;
  a.next_scales[j] = rows.scales;
}

Status refused() { return {Code::kNoMemory, ""}; }

void run_dot(const LinearKernels& kernels, const Product& p, int64_t begin, int64_t n, float* out, int64_t out_stride,
             float scale) {
  kernels.dot[static_cast<size_t>(p.w.format)](
      {weight_rows(p.w, begin, n), p.x_f32, p.x_stride, p.rows, out, out_stride, scale});
}

void run_bf16_dot(const Product& p, const PackedInputs& packed, const Piece& piece, float* out, int64_t out_stride,
                  float scale) {
  Bf16DotArgs a = packed.dot(p);
  a.w = weight_rows(p.w, piece.out_begin, piece.out_n);
  a.out = out;
  a.out_stride = out_stride;
  a.out_scale = scale;
  bf16_dot_kernels().dot[static_cast<size_t>(p.w.format)](a);
}

}  // namespace

const LinearKernels& linear_kernels(Isa isa) {
  if (isa >= Isa::kAvx512) return linear_kernels_avx512();
  return isa == Isa::kAvx2 ? linear_kernels_avx2() : linear_kernels_scalar();
}

// Weights of a tile stay in the second-level cache while all input rows pass.
int64_t gemm_tile_rows(GemmType type, int64_t k) {
  const int64_t bytes = int64_t{768} << 10;
  return std::clamp<int64_t>(bytes / (std::max<int64_t>(1, k) * element_bytes(type)) / 32 * 32, 32, 128);
}

int64_t linear_tile_bytes(int64_t n_threads, int64_t max_k) {
  int64_t tile = kDotManyRows * 2 * round_up(max_k, kXPad) * 4;
  for (const GemmType type : {GemmType::kF32, GemmType::kBf16}) {
    tile = std::max(tile, gemm_tile_rows(type, max_k) * tile_stride(max_k) * element_bytes(type));
  }
  tile = std::max(tile, int64_t{128} * tile_stride(3072) * 4);
  tile = std::max(tile, amx_scratch_bytes(kTileChunkRows));
  const int64_t values = kGatedChunkRows * 2 * 512 * 4;
  const int64_t pad = int64_t{4} << 20;  // oneDNN's own need: under 3 MB at M3's shapes
  return n_threads * (tile + values + pad + 3 * 4096);
}

void widen_rows(const LinearContext& context, const ConstMatrixView& x, float* out, int64_t out_stride) {
  context.team->parallel_for(x.rows, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* const to = out + r * out_stride;
      if (x.dtype == DType::kF32) {
        std::memcpy(to, x.row(r), static_cast<size_t>(x.cols) * 4);
      } else {
        context.kernels->widen(static_cast<const uint16_t*>(x.row(r)), to, x.cols);
      }
      std::fill(to + x.cols, to + round_up(x.cols, kXPad), 0.0f);
    }
  });
}

Status run_products(const LinearContext& context, std::span<const Product> products) {
  const LinearKernels& kernels = *context.kernels;
  std::vector<Cut> cuts;
  Gemms gemms(context.gemms);
  PackedInputs packed;
  int64_t first = 0, tile = 0, bytes = 0;
  for (const Product& p : products) bytes += p.w.rows * row_bytes_of(p.w);
  for (const Product& p : products) {
    const Cut c = cut_product(p, tile_piece_bytes(bytes, context.team->size()), first);
    first += c.tiles * c.chunks;
    tile = std::max(tile, tile_bytes(p, c, stored_as_gemm(p.w, p.type), 1));
    if (p.path == LinearPath::kGemm && c.tiles > 0) {
      FIRN_TRY(need_gemms(gemms, p, c, stored_as_gemm(p.w, p.type), 1, c.chunk, p.out_stride));
    }
    packed.need(p);
    cuts.push_back(c);
  }
  const Cuts pieces(std::move(cuts));
  const ThreadScratch scratch(context, packed.bytes(), tile, 0, gemms.scratchpad_bytes());
  if (!scratch.ok()) return refused();
  packed.pack(context.team, scratch.shared());
  for_pieces(context.team, pieces.size(), [&](int64_t i, int64_t then, int thread) {
    const Piece piece = pieces.piece(i);
    const Product& p = products[piece.product];
    float* const out = p.out + piece.out_begin;
    switch (p.path) {
      case LinearPath::kDot:
        run_dot(kernels, p, piece.out_begin, piece.out_n, out, p.out_stride, out_scale(p.w));
        return;
      case LinearPath::kBf16Dot:
        run_bf16_dot(p, packed, piece, out, p.out_stride, out_scale(p.w));
        return;
      case LinearPath::kTiles: {
        AmxGemmArgs a = tile_args(p, packed, piece, scratch.tile(thread));
        a.w[0] = tile_weights(p.w, piece, out_scale(p.w), out + piece.row_begin * p.out_stride);
        a.out_stride = p.out_stride;
        if (then < pieces.size()) {
          const Piece next = pieces.piece(then);
          ask_for(a, 0, products[next.product].w, next);
        }
        amx_kernels().gemm(a);
        return;
      }
      case LinearPath::kDotMany: {
        const int64_t stride = round_up(p.w.cols, kXPad);
        dequantise(kernels, p.w, piece.out_begin, piece.out_n, GemmType::kF32, scratch.tile(thread), stride);
        const WeightRows w = {reinterpret_cast<const uint8_t*>(scratch.tile(thread)),
                              nullptr,
                              stride * 4,
                              0,
                              piece.out_n,
                              stride,
                              nullptr};
        kernels.dot_many({w, p.x_f32 + piece.row_begin * p.x_stride, p.x_stride, piece.row_n,
                          out + piece.row_begin * p.out_stride, p.out_stride, out_scale(p.w)});
        return;
      }
      case LinearPath::kGemm:
        break;
    }
    const bool stored = stored_as_gemm(p.w, p.type);
    const void* const b = gemm_weights(kernels, p, stored, piece.out_begin, piece.out_n, scratch.tile(thread));
    for (const RowPiece& rows : row_pieces(piece.row_n)) {
      const GemmShape shape = gemm_shape(p, rows.rows, piece.out_n, stored, p.out_stride);
      const int64_t row = piece.row_begin + rows.begin;
      gemms.at(shape).run(x_at(p, row), b, out + row * p.out_stride, scratch.pad(thread));
    }
    const float factor = out_scale(p.w);
    for (int64_t r = 0; factor != 1.0f && r < piece.row_n; ++r) {
      kernels.scale(out + (piece.row_begin + r) * p.out_stride, piece.out_n, factor);
    }
  });
  return {};
}

Status run_gated(const LinearContext& context, std::span<const GatedProduct> products, const Activation& activation) {
  const LinearKernels& kernels = *context.kernels;
  std::vector<Cut> cuts;
  Gemms gemms(context.gemms);
  PackedInputs packed;
  int64_t first = 0, tile = 0, values = 0, bytes = 0;
  for (const GatedProduct& g : products) bytes += g.up.rows * (row_bytes_of(g.gate.w) + row_bytes_of(g.up));
  for (const GatedProduct& g : products) {
    const Product& p = g.gate;
    Cut c = cut_product(p, tile_piece_bytes(bytes, context.team->size()), first);
    if (c.tiles > 0) {
      // Gate and up share what one weight had.
      const bool dot = p.path == LinearPath::kDot || p.path == LinearPath::kBf16Dot;
      c.tile = dot ? dot_piece_rows(p.w, 128) : std::max<int64_t>(kAmxRows, c.tile / 2);
      c.tiles = (p.w.rows + c.tile - 1) / c.tile;
      const int64_t chunk = dot ? p.rows : p.path == LinearPath::kTiles ? c.chunk : kGatedChunkRows + kMinGemmRows;
      values = std::max(values, std::min(p.rows, chunk) * 2 * c.tile);
      tile = std::max(tile, tile_bytes(p, c, stored_pair(g), 2));
      if (p.path == LinearPath::kGemm) {
        FIRN_TRY(need_gemms(gemms, p, c, stored_pair(g), 2, kGatedChunkRows, 2 * c.tile));
      }
      packed.need(p);
      Product up = p;
      up.w = g.up;
      packed.need(up);
    }
    first += c.tiles * c.chunks;
    cuts.push_back(c);
  }
  const Cuts pieces(std::move(cuts));
  const ThreadScratch scratch(context, packed.bytes(), tile, values, gemms.scratchpad_bytes());
  if (!scratch.ok()) return refused();
  packed.pack(context.team, scratch.shared());
  for_pieces(context.team, pieces.size(), [&](int64_t i, int64_t then, int thread) {
    const Piece piece = pieces.piece(i);
    const GatedProduct& g = products[piece.product];
    const Product& p = g.gate;
    Product up = p;
    up.w = g.up;
    const int64_t n = piece.out_n;
    const int64_t ld = 2 * pieces.at(piece.product).tile;
    const bool stored = stored_pair(g);
    float* const gates = scratch.values(thread);
    float* const ups = gates + (p.path == LinearPath::kGemm && stored ? ld / 2 : n);
    const auto activate = [&](int64_t row, int64_t rows) {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (row + r) * g.act_stride + piece.out_begin;
        kernels.activate({gates + r * ld, ups + r * ld, n, out_scale(p.w), out_scale(g.up), activation.alpha,
                          activation.beta, activation.limit, g.act_f32 == nullptr ? nullptr : g.act_f32 + at,
                          g.act_bf16 == nullptr ? nullptr : g.act_bf16 + at, g.round_to_bf16});
      }
    };
    switch (p.path) {
      case LinearPath::kDot:
        run_dot(kernels, p, piece.out_begin, n, gates, ld, 1.0f);
        run_dot(kernels, up, piece.out_begin, n, ups, ld, 1.0f);
        return activate(0, p.rows);
      case LinearPath::kBf16Dot:
        run_bf16_dot(p, packed, piece, gates, ld, 1.0f);
        run_bf16_dot(up, packed, piece, ups, ld, 1.0f);
        return activate(0, p.rows);
      case LinearPath::kTiles: {
        AmxGemmArgs a = tile_args(p, packed, piece, scratch.tile(thread));
        a.out_stride = ld;
        a.w[0] = tile_weights(p.w, piece, 1.0f, gates);
        a.w[1] = tile_weights(g.up, piece, 1.0f, ups);
        if (then < pieces.size()) {
          const Piece next = pieces.piece(then);
          ask_for(a, 0, products[next.product].gate.w, next);
          ask_for(a, 1, products[next.product].up, next);
        }
        if (p.w.format == g.up.format) {
          a.n_w = 2;
          amx_kernels().gemm(a);
        } else {
          amx_kernels().gemm(a);
          a.x = packed.tiles(up, piece.row_begin);
          a.w[0] = a.w[1];
          amx_kernels().gemm(a);
        }
        return activate(piece.row_begin, piece.row_n);
      }
      case LinearPath::kDotMany: {
        const int64_t stride = round_up(p.w.cols, kXPad);
        std::byte* const w_tile = scratch.tile(thread);
        dequantise(kernels, p.w, piece.out_begin, n, GemmType::kF32, w_tile, stride);
        dequantise(kernels, g.up, piece.out_begin, n, GemmType::kF32, w_tile + n * stride * 4, stride);
        const WeightRows w = {reinterpret_cast<const uint8_t*>(w_tile), nullptr, stride * 4, 0, 2 * n, stride, nullptr};
        for (int64_t r = 0; r < piece.row_n; r += kGatedChunkRows) {
          const int64_t rows = std::min(kGatedChunkRows, piece.row_n - r), row = piece.row_begin + r;
          kernels.dot_many({w, p.x_f32 + row * p.x_stride, p.x_stride, rows, gates, ld, 1.0f});
          activate(row, rows);
        }
        return;
      }
      case LinearPath::kGemm:
        break;
    }
    std::byte* const w_tile = scratch.tile(thread);
    const void* const b = gemm_weights(kernels, p, stored, piece.out_begin, n, w_tile);
    const void* const b_up = gemm_weights(kernels, up, stored, piece.out_begin, n,
                                          w_tile + n * tile_stride(p.w.cols) * element_bytes(p.type));
    for (int64_t r = 0; r < piece.row_n;) {
      const int64_t left = piece.row_n - r;
      const int64_t rows = left < kGatedChunkRows + kMinGemmRows ? left : kGatedChunkRows;
      for (const RowPiece& cut : row_pieces(rows)) {
        const void* const a = x_at(p, piece.row_begin + r + cut.begin);
        const GemmKernel& kernel = gemms.at(gemm_shape(p, cut.rows, stored ? n : 2 * n, stored, ld));
        kernel.run(a, b, gates + cut.begin * ld, scratch.pad(thread));
        if (stored) kernel.run(a, b_up, ups + cut.begin * ld, scratch.pad(thread));
      }
      activate(piece.row_begin + r, rows);
      r += rows;
    }
  });
  return {};
}

}  // namespace firn::cpu
