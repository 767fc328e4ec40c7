// The read queue: every shape of read through every backend, order and caps, cancelling, and reads that go wrong.
#include "tests/storage/io_queue_fixture.h"

namespace firn::storage {
namespace {

TEST_CASE("Reads of every shape bring the bytes of the file and touch nothing else", "[io_queue]") {
  constexpr int64_t kSize = 5 * kMiB + 1234;
  const std::vector<Shape> shapes = {
      {"aligned", {{4096, 8192, 0}}},
      {"one byte", {{12345, 1, 7}}},
      {"nothing", {{100, 0, 0}}},
      {"no pieces", {}},
      {"unaligned offset", {{4097, 8192, 0}}},
      {"unaligned length", {{4096, 8191, 0}}},
      {"unaligned address", {{4096, 8192, 16}}},
      {"same skew in file and memory", {{4096 + 512, kMiB, 512}}},
      {"across one block border", {{4090, 12, 3}}},
      {"larger than a part", {{0, 3 * kMiB, 0}}},
      {"larger than a part, unaligned", {{777, 3 * kMiB + 5, 3}}},
      {"larger than a part, ragged end", {{8192, 2 * kMiB + 100, 0}}},
      {"end of file", {{kSize - 5000, 5000, 0}}},
      {"last byte", {{kSize - 1, 1, 0}}},
      {"whole file", {{0, kSize, 0}}},
      {"several", {{0, 4096, 0}, {kMiB, 300000, 0}, {5, 10, 1}, {50, 0, 0}, {2 * kMiB + 1, 2 * kMiB, 9}}},
  };
  const PatternFile direct(kSize), buffered(kSize, OpenMode::kRead);
  FaultyFileSystem wrapping(FileSystem::real(), {});
  const PatternFile wrapped(kSize, OpenMode::kReadDirect, &wrapping);
  const PatternFile wrapped_buffered(kSize, OpenMode::kRead, &wrapping);
  for (IoQueueOptions options : backends()) {
    for (const int64_t part_bytes : {int64_t{4096}, 3 * int64_t{4096}, kMiB}) {
      options.part_bytes = part_bytes;
      const auto queue = make_queue(options);
      for (const Shape& shape : shapes) {
        INFO(queue->backend() << ", parts of " << part_bytes << ": " << shape.name);
        // The piece once from each kind of file, all in the same read.
        std::vector<Buffer> buffers;
        IoRead read;
        int finished = 0;
        read.finish = [&] {
          ++finished;
          return Status();
        };
        for (const Shape::Range& range : shape.ranges) {
          for (const PatternFile* f : {&direct, &buffered, &wrapped, &wrapped_buffered}) {
            buffers.emplace_back(range.bytes, range.skew);
            read.pieces.push_back({f->file.get(), range.offset, range.bytes, buffers.back().data()});
          }
        }
        const std::vector<IoPiece> pieces = read.pieces;
        const IoTicket ticket = queue->submit(std::move(read));
        const Status status = ticket.wait();
        INFO(status.message());
        REQUIRE(status.ok());
        CHECK(ticket.done());
        CHECK(finished == 1);
        for (size_t i = 0; i < buffers.size(); ++i) {
          CHECK(buffers[i].holds_pattern(pieces[i].offset));
          CHECK(buffers[i].guards_intact());
        }
      }
      CHECK(queue->idle());
      CHECK(queue->buffer_bytes() > 0);
      CHECK(queue->stats().reads == static_cast<int64_t>(shapes.size()));
      CHECK(queue->stats().demand_bytes >= kSize);
      CHECK(queue->stats().speculative_bytes == 0);
      CHECK(queue->stats().busy_seconds > 0);
    }
  }
}

TEST_CASE("Aligned pieces of a direct file are not copied", "[io_queue]") {
  const PatternFile f(2 * kMiB);
  if (f.file->direct_alignment() == 0) return;  // this file system has no direct I/O
  for (const IoQueueOptions& options : backends()) {
    const auto queue = make_queue(options);
    const Buffer aligned(2 * kMiB, 0), skewed(kMiB, 8);
    CHECK(queue->submit({{{f.file.get(), 0, 2 * kMiB, aligned.data()}}, IoClass::kDemand, {}}).wait().ok());
    CHECK(queue->stats().bounced_bytes == 0);
    CHECK(queue->stats().parts == 2);
    CHECK(queue->submit({{{f.file.get(), 0, kMiB, skewed.data()}}, IoClass::kDemand, {}}).wait().ok());
    CHECK(queue->stats().bounced_bytes == kMiB);
  }
}

TEST_CASE("The backend is named, and so is why it is not io_uring", "[io_queue]") {
  IoQueueOptions options;
  options.io_uring = false;
  const auto preads = make_queue(options);
  CHECK(std::string(preads->backend()) == "preads");
  CHECK(contains(preads->refusal(), "option"));
  const auto ring = make_queue({});
  CHECK(ring->refusal().empty() == (std::string(ring->backend()) == "io_uring"));

  // Without descriptors to spare the kernel refuses a ring, and reads go on.
  rlimit old{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &old) == 0);
  const PatternFile f(5000, OpenMode::kRead);
  rlimit none = old;
  none.rlim_cur = 0;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  auto refused = IoQueue::create({});
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &old) == 0);
  REQUIRE(refused.ok());
  CHECK(std::string((*refused)->backend()) == "preads");
  CHECK(contains((*refused)->refusal(), "io_uring"));
  const Buffer out(5000, 1);
  CHECK((*refused)->submit({{{f.file.get(), 0, 5000, out.data()}}, IoClass::kDemand, {}}).wait().ok());
  CHECK(out.holds_pattern(0));
}

TEST_CASE("Options and pieces that make no sense are refused by name", "[io_queue]") {
  const auto refused = [](auto change) {
    IoQueueOptions options;
    change(options);
    const auto queue = IoQueue::create(options);
    return queue.ok() ? std::string() : queue.status().message();
  };
  CHECK(contains(refused([](IoQueueOptions& o) { o.depth = 0; }), "depth is 0"));
  CHECK(contains(refused([](IoQueueOptions& o) { o.speculative_depth = 0; }), "speculative_depth is 0"));
  CHECK(contains(refused([](IoQueueOptions& o) { o.part_bytes = 5000; }), "part_bytes is 5000"));
  CHECK(contains(refused([](IoQueueOptions& o) { o.threads = 0; }), "threads is 0"));

  const PatternFile f(5000, OpenMode::kRead);
  const auto queue = make_queue({});
  std::byte out[8];
  for (const IoPiece& piece :
       {IoPiece{nullptr, 0, 1, out}, IoPiece{f.file.get(), -1, 1, out}, IoPiece{f.file.get(), 0, -1, out},
        IoPiece{f.file.get(), 0, 1, nullptr}, IoPiece{f.file.get(), INT64_MAX - 3, 8, out}}) {
    const IoTicket ticket = queue->submit({{piece}, IoClass::kDemand, {}});
    CHECK(ticket.done());
    CHECK(ticket.wait().code() == Code::kInvalid);
    CHECK_FALSE(ticket.cancel());
    ticket.promote();
  }
  const IoTicket empty;
  CHECK(empty.done());
  CHECK(empty.wait().ok());
  CHECK_FALSE(empty.cancel());
  CHECK(empty.seconds() == 0);
}

IoTicket read_block(IoQueue& queue, const File& file, int64_t block, const Buffer& out, IoClass io_class) {
  return queue.submit({{{&file, block * 4096, 4096, out.data()}}, io_class, {}});
}

TEST_CASE("Demand overtakes speculation, and a promoted read joins it", "[io_queue]") {
  const PatternFile f(16 * 4096, OpenMode::kRead);
  GateFile gate(*f.file);
  for (IoQueueOptions options : backends()) {
    options.depth = 1;
    const size_t before = gate.order().size();
    gate.shut();
    const Buffer out(4096, 0);
    const auto queue = make_queue(options);
    std::vector<IoTicket> tickets;
    tickets.push_back(read_block(*queue, gate, 0, out, IoClass::kSpeculative));
    REQUIRE(gate.wait_for_reads(before + 1));
    for (const int block : {1, 2, 3}) {
      tickets.push_back(read_block(*queue, gate, block, out, IoClass::kSpeculative));
    }
    for (const int block : {4, 5}) tickets.push_back(read_block(*queue, gate, block, out, IoClass::kDemand));
    tickets[2].promote();
    tickets[2].promote();  // once is enough
    tickets[0].promote();  // too late to matter
    gate.open();
    for (const IoTicket& ticket : tickets) CHECK(ticket.wait().ok());
    std::vector<int64_t> blocks;
    for (const int64_t offset : gate.order()) blocks.push_back(offset / 4096);
    blocks.erase(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(before));
    CHECK(blocks == std::vector<int64_t>{0, 4, 5, 2, 1, 3});
    CHECK(queue->stats().speculative_bytes == 4 * 4096);
    CHECK(queue->stats().demand_bytes == 2 * 4096);
  }
}

TEST_CASE("Demand on a slow file holds back speculation on a fast one", "[io_queue]") {
  FaultyFileSystem slow_files(FileSystem::real(), {{.kind = FaultKind::kSlowRead, .delay = 20ms}});
  const PatternFile slow(16 * 4096, OpenMode::kRead, &slow_files), fast(16 * 4096);
  for (IoQueueOptions options : backends()) {
    options.depth = 1;
    const auto queue = make_queue(options);
    const Buffer out(4096, 0);
    std::vector<int> order;
    std::mutex mutex;
    std::vector<IoTicket> tickets;
    const auto add = [&](int name, const PatternFile& file, IoClass io_class) {
      tickets.push_back(queue->submit({{{file.file.get(), 0, 4096, out.data()}}, io_class, [&order, &mutex, name] {
                                         const std::lock_guard lock(mutex);
                                         order.push_back(name);
                                         return Status();
                                       }}));
    };
    add(0, slow, IoClass::kDemand);
    add(1, fast, IoClass::kSpeculative);
    add(2, slow, IoClass::kDemand);
    add(3, slow, IoClass::kSpeculative);
    for (const IoTicket& ticket : tickets) CHECK(ticket.wait().ok());
    REQUIRE(order.size() == 4);
    CHECK(order[0] == 0);
    CHECK(order[1] == 2);
    CHECK(tickets[0].seconds() >= 0.015);
  }
}

TEST_CASE("Caps on parts and bytes in flight hold", "[io_queue]") {
  const PatternFile f(64 * 4096, OpenMode::kRead);
  struct Caps {
    IoClass io_class;
    int depth;
    int64_t depth_bytes;
    int speculative_depth;
    int64_t speculative_bytes;
    int expected;  // most parts of 4096 bytes in flight
  };
  const std::vector<Caps> table = {
      {IoClass::kDemand, 5, kMiB, 1, 1, 5},
      {IoClass::kDemand, 8, 3 * 4096, 8, kMiB, 3},
      {IoClass::kDemand, 8, 100, 8, kMiB, 1},
      {IoClass::kSpeculative, 8, kMiB, 2, kMiB, 2},
      {IoClass::kSpeculative, 2, kMiB, 8, kMiB, 2},
      {IoClass::kSpeculative, 8, kMiB, 8, 3 * 4096, 3},
      {IoClass::kSpeculative, 8, kMiB, 8, 4096 - 1, 1},
  };
  for (const Caps& caps : table) {
    for (IoQueueOptions options : backends()) {
      options.depth = caps.depth;
      options.depth_bytes = caps.depth_bytes;
      options.speculative_depth = caps.speculative_depth;
      options.speculative_bytes = caps.speculative_bytes;
      options.part_bytes = 4096;
      options.threads = 12;
      GateFile gate(*f.file);
      gate.shut();
      const auto queue = make_queue(options);
      const Buffer out(f.bytes, 0);
      const IoTicket ticket = queue->submit({{{&gate, 0, f.bytes, out.data()}}, caps.io_class, {}});
      // As many as may go do go, while none comes back.
      CHECK(gate.wait_for_reads(static_cast<size_t>(caps.expected)));
      std::this_thread::sleep_for(2ms);
      CHECK(gate.order().size() == static_cast<size_t>(caps.expected));
      gate.pause(100us);
      gate.open();
      CHECK(ticket.wait().ok());
      CHECK(out.holds_pattern(0));
      CHECK(gate.most() == caps.expected);
      CHECK(gate.most_bytes() == caps.expected * 4096);
    }
  }
}

TEST_CASE("Speculation leaves room for demand", "[io_queue]") {
  const PatternFile f(64 * 4096, OpenMode::kRead);
  GateFile gate(*f.file);
  gate.shut();
  IoQueueOptions options;
  options.depth = 4;
  options.speculative_depth = 2;
  options.part_bytes = 4096;
  options.threads = 8;
  const auto queue = make_queue(options);
  const Buffer a(8 * 4096, 0), b(8 * 4096, 0);
  const IoTicket guess = queue->submit({{{&gate, 0, 8 * 4096, a.data()}}, IoClass::kSpeculative, {}});
  REQUIRE(gate.wait_for_reads(2));
  const IoTicket wanted = queue->submit({{{&gate, 8 * 4096, 8 * 4096, b.data()}}, IoClass::kDemand, {}});
  CHECK(gate.wait_for_reads(4));
  for (const int64_t offset : {8 * 4096, 9 * 4096}) {
    const std::vector<int64_t> order = gate.order();
    CHECK(std::find(order.begin(), order.end(), offset) != order.end());
  }
  gate.open();
  CHECK(wanted.wait().ok());
  CHECK(guess.wait().ok());
  CHECK(a.holds_pattern(0));
  CHECK(b.holds_pattern(8 * 4096));
}

TEST_CASE("A queued read can be cancelled, a started one cannot", "[io_queue]") {
  const PatternFile f(16 * 4096, OpenMode::kRead);
  const PatternFile direct(16 * 4096);
  for (IoQueueOptions options : backends()) {
    options.depth = 1;
    GateFile gate(*f.file);
    gate.shut();
    const auto queue = make_queue(options);
    const Buffer started_out(4096, 0), cancelled_out(4096, 0), behind_out(4096, 0);
    const IoTicket started = read_block(*queue, gate, 0, started_out, IoClass::kDemand);
    REQUIRE(gate.wait_for_reads(1));
    // Held by the read's callback; a cancelled read lets go of it.
    auto held = std::make_shared<int>(1);
    bool ran = false;
    const IoTicket queued =
        queue->submit({{{direct.file.get(), 4096, 4096, cancelled_out.data()}}, IoClass::kDemand, [held, &ran] {
                         ran = true;
                         return Status();
                       }});
    const IoTicket behind = read_block(*queue, gate, 2, behind_out, IoClass::kSpeculative);
    CHECK_FALSE(started.cancel());
    CHECK(queued.cancel());
    CHECK(queued.done());
    CHECK(queued.wait().code() == Code::kCancelled);
    CHECK_FALSE(queued.cancel());
    CHECK(held.use_count() == 1);
    CHECK_FALSE(queue->idle());
    gate.open();
    CHECK(started.wait().ok());
    CHECK(behind.wait().ok());
    CHECK_FALSE(started.cancel());
    CHECK(started_out.holds_pattern(0));
    CHECK(behind_out.holds_pattern(2 * 4096));
    CHECK_FALSE(ran);
    CHECK(cancelled_out.data()[0] == kUntouched);
    CHECK(queue->stats().cancelled == 1);
    CHECK(queue->idle());
  }
}

TEST_CASE("What finish returns is the read's status, and it runs before the read is done", "[io_queue]") {
  const PatternFile f(16 * 4096);
  for (const IoQueueOptions& options : backends()) {
    const auto queue = make_queue(options);
    const Buffer out(4096, 0);
    std::atomic<bool> complete{false};
    const IoTicket bad = queue->submit({{{f.file.get(), 4096, 4096, out.data()}}, IoClass::kDemand, [&] {
                                          complete = out.holds_pattern(4096);
                                          return corrupt("the checksum does not match");
                                        }});
    CHECK(bad.wait().code() == Code::kCorrupt);
    CHECK(contains(bad.wait().message(), "checksum"));
    CHECK(complete);
    bool called = false;
    const IoTicket failed = queue->submit({{{f.file.get(), 15 * 4096, 8192, out.data()}}, IoClass::kDemand, [&] {
                                             called = true;
                                             return Status();
                                           }});
    CHECK_FALSE(failed.wait().ok());
    CHECK_FALSE(called);
  }
}

TEST_CASE("The end of the file before the end of the read is named", "[io_queue]") {
  constexpr int64_t kSize = 10 * 4096 + 100;
  const PatternFile direct(kSize), buffered(kSize, OpenMode::kRead);
  FaultyFileSystem wrapping(FileSystem::real(), {});
  const PatternFile wrapped(kSize, OpenMode::kReadDirect, &wrapping);
  FaultyFileSystem cutting(FileSystem::real(), {{.kind = FaultKind::kEarlyEnd, .bytes = kSize}});
  const PatternFile cut(kSize + 100000, OpenMode::kReadDirect, &cutting);
  const PatternFile cut_buffered(kSize + 100000, OpenMode::kRead, &cutting);
  struct Range {
    int64_t offset, bytes;
  };
  for (IoQueueOptions options : backends()) {
    options.part_bytes = 2 * 4096;
    const auto queue = make_queue(options);
    for (const PatternFile* f : {&direct, &buffered, &wrapped, &cut, &cut_buffered}) {
      for (const Range& r : {Range{0, kSize + 1}, Range{4096, 20 * 4096}, Range{kSize - 5, 50}, Range{9 * 4096, 8192},
                             Range{kSize, 1}, Range{100 * 4096, 4096}, Range{777, kSize}}) {
        INFO(queue->backend() << ": " << r.bytes << " bytes at " << r.offset);
        const Buffer out(r.bytes, 0), good(4096, 0);
        const IoTicket ticket =
            queue->submit({{{f->file.get(), 0, 4096, good.data()}, {f->file.get(), r.offset, r.bytes, out.data()}},
                           IoClass::kDemand,
                           {}});
        const Status status = ticket.wait();
        INFO(status.message());
        CHECK(status.code() == Code::kCorrupt);
        CHECK(contains(status.message(), f->path));
        CHECK(contains(status.message(), "expected " + std::to_string(r.bytes) + " bytes at offset " +
                                             std::to_string(r.offset) + ", found " +
                                             std::to_string(std::max<int64_t>(kSize - r.offset, 0)) + ";"));
        CHECK(out.guards_intact());
      }
    }
    CHECK(queue->idle());
  }
}

TEST_CASE("Short reads are continued", "[io_queue]") {
  for (const int64_t brief : {int64_t{1}, int64_t{1000}, int64_t{4096}, int64_t{5000}, int64_t{60000}}) {
    for (const OpenMode mode : {OpenMode::kRead, OpenMode::kReadDirect}) {
      const int64_t bytes = brief == 1 ? 3 * 4096 : 200000;
      FaultyFileSystem fs(FileSystem::real(), {{.kind = FaultKind::kShortRead, .bytes = brief}});
      const PatternFile f(bytes, mode, &fs);
      IoQueueOptions options;
      options.part_bytes = 64 * 1024;
      const auto queue = make_queue(options);
      INFO("at most " << brief << " bytes a call");
      const Buffer aligned(8192, 0), odd(bytes - 77, 5);
      CHECK(queue->submit({{{f.file.get(), 0, 8192, aligned.data()}}, IoClass::kDemand, {}}).wait().ok());
      CHECK(queue->submit({{{f.file.get(), 77, bytes - 77, odd.data()}}, IoClass::kDemand, {}}).wait().ok());
      CHECK(aligned.holds_pattern(0));
      CHECK(odd.holds_pattern(77));
      CHECK(fs.hits() > 0);
      CHECK(odd.guards_intact());
      CHECK(queue->stats().short_reads > 0);
    }
  }
}

TEST_CASE("An I/O error is tried once more and then reported", "[io_queue]") {
  constexpr int64_t kPart = 4096;
  const auto errors = [](int64_t first, int64_t count) {
    return std::vector<Fault>{{.kind = FaultKind::kReadError, .first = first, .count = count}};
  };
  for (IoQueueOptions options : backends()) {
    options.part_bytes = kPart;
    options.threads = 1;  // calls in order
    {
      FaultyFileSystem fs(FileSystem::real(), errors(3, 1));
      const PatternFile f(8 * kPart, OpenMode::kReadDirect, &fs);
      const auto queue = make_queue(options);
      const Buffer out(8 * kPart, 0);
      CHECK(queue->submit({{{f.file.get(), 0, 8 * kPart, out.data()}}, IoClass::kDemand, {}}).wait().ok());
      CHECK(out.holds_pattern(0));
      CHECK(queue->stats().retried == 1);
      CHECK(fs.hits() == 1);
    }
    {
      FaultyFileSystem fs(FileSystem::real(), errors(3, 2));
      const PatternFile f(8 * kPart, OpenMode::kReadDirect, &fs);
      const auto queue = make_queue(options);
      const Buffer out(8 * kPart, 0);
      const Status status = queue->submit({{{f.file.get(), 0, 8 * kPart, out.data()}}, IoClass::kDemand, {}}).wait();
      CHECK(status.code() == Code::kIo);
      CHECK(contains(status.message(), f.path));
      CHECK(contains(status.message(), "4096 bytes at offset 8192"));
      CHECK(contains(status.message(), "twice"));
      CHECK(queue->stats().retried == 1);
      // The queue is fit for the next read.
      const IoTicket next = queue->submit({{{f.file.get(), 0, 8 * kPart, out.data()}}, IoClass::kDemand, {}});
      CHECK(next.wait().ok());
      CHECK(out.holds_pattern(0));
    }
  }
}

TEST_CASE("Nothing is written to a destination after a failed read is done", "[io_queue]") {
  for (IoQueueOptions options : backends()) {
    // The first read fails at once, the others are slow.
    FaultyFileSystem fs(FileSystem::real(), {{.kind = FaultKind::kEarlyEnd, .first = 1, .count = 1, .bytes = 0},
                                             {.kind = FaultKind::kSlowRead, .first = 2, .delay = 10ms}});
    const PatternFile f(16 * 4096, OpenMode::kRead, &fs);
    options.part_bytes = 4096;
    const auto queue = make_queue(options);
    Buffer out(16 * 4096, 0);
    CHECK_FALSE(queue->submit({{{f.file.get(), 0, 16 * 4096, out.data()}}, IoClass::kDemand, {}}).wait().ok());
    std::fill_n(out.data(), 16 * 4096, kUntouched);
    std::this_thread::sleep_for(15ms);
    CHECK(std::all_of(out.data(), out.data() + 16 * 4096, [](std::byte b) { return b == kUntouched; }));
    CHECK(queue->stats().parts < 16);  // the rest was not even started
  }
}

TEST_CASE("Completions out of order end up in their places", "[io_queue]") {
  FaultyFileSystem fs(FileSystem::real(), {{.kind = FaultKind::kSlowRead, .probability = 0.3, .delay = 3ms}}, 7);
  const PatternFile f(kMiB, OpenMode::kReadDirect, &fs);
  for (IoQueueOptions options : backends()) {
    options.part_bytes = 16 * 1024;
    options.threads = 8;
    const auto queue = make_queue(options);
    const Buffer a(kMiB, 0), b(kMiB - 3, 1);
    const IoTicket first = queue->submit({{{f.file.get(), 0, kMiB, a.data()}}, IoClass::kDemand, {}});
    const IoTicket second = queue->submit({{{f.file.get(), 3, kMiB - 3, b.data()}}, IoClass::kSpeculative, {}});
    CHECK(second.wait().ok());
    CHECK(first.wait().ok());
    CHECK(a.holds_pattern(0));
    CHECK(b.holds_pattern(3));
    CHECK(fs.hits() > 0);
  }
}

TEST_CASE("A queue that goes away cancels what is queued and waits for what is in flight", "[io_queue]") {
  FaultyFileSystem fs(FileSystem::real(), {{.kind = FaultKind::kSlowRead, .delay = 5ms}});
  const PatternFile slow(64 * 4096, OpenMode::kRead, &fs), direct(2 * kMiB);
  for (IoQueueOptions options : backends()) {
    options.depth = 2;
    options.part_bytes = 4096;
    auto queue = make_queue(options);
    std::vector<Buffer> outs;
    std::vector<IoTicket> tickets;
    for (int i = 0; i < 20; ++i) {
      outs.emplace_back(8 * 4096, 0);
      const File* file = i % 2 == 0 ? slow.file.get() : direct.file.get();
      tickets.push_back(queue->submit({{{file, i * 4096, 8 * 4096, outs.back().data()}},
                                       i % 3 == 0 ? IoClass::kDemand : IoClass::kSpeculative,
                                       {}}));
    }
    std::thread waiter([&] { CHECK(tickets.back().wait().code() == Code::kCancelled); });
    queue.reset();
    waiter.join();
    int cancelled_reads = 0;
    for (size_t i = 0; i < tickets.size(); ++i) {
      REQUIRE(tickets[i].done());
      if (tickets[i].wait().ok()) {
        CHECK(outs[i].holds_pattern(static_cast<int64_t>(i) * 4096));
      } else {
        CHECK(tickets[i].wait().code() == Code::kCancelled);
        ++cancelled_reads;
      }
      CHECK_FALSE(tickets[i].cancel());
      tickets[i].promote();  // tickets outlive the queue
    }
    CHECK(cancelled_reads > 10);
  }
  // And without ever having read anything.
  for (const IoQueueOptions& options : backends()) CHECK(make_queue(options)->idle());
}

TEST_CASE("Many threads submit, wait, cancel and promote at once", "[io_queue]") {
  const PatternFile direct(kMiB), buffered(kMiB, OpenMode::kRead);
  FaultyFileSystem fs(FileSystem::real(), {});
  const PatternFile wrapped(kMiB, OpenMode::kReadDirect, &fs);
  for (IoQueueOptions options : backends()) {
    options.part_bytes = 8192;
    options.depth = 6;
    options.speculative_depth = 2;
    const auto queue = make_queue(options);
    std::atomic<int> wrong{0}, ok{0}, dropped{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 6; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 rng(t);
        for (int i = 0; i < 100; ++i) {
          const PatternFile& f = rng() % 3 == 0 ? wrapped : rng() % 2 == 0 ? direct : buffered;
          const int64_t offset = static_cast<int64_t>(rng() % 900000), bytes = static_cast<int64_t>(rng() % 30000 + 1);
          const Buffer out(bytes, static_cast<int64_t>(rng() % 64));
          const IoTicket ticket = queue->submit({{{f.file.get(), offset, bytes, out.data()}},
                                                 rng() % 2 == 0 ? IoClass::kDemand : IoClass::kSpeculative,
                                                 {}});
          if (rng() % 4 == 0) ticket.promote();
          const bool gone = rng() % 4 == 0 && ticket.cancel();
          const Status status = ticket.wait();
          if (gone) {
            if (status.code() != Code::kCancelled) ++wrong;
            ++dropped;
          } else {
            if (!status.ok() || !out.holds_pattern(offset)) ++wrong;
            ++ok;
          }
          if (!out.guards_intact()) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(ok + dropped == 600);
    CHECK(queue->idle());
    CHECK(queue->stats().reads == 600);
    CHECK(queue->stats().cancelled == dropped);
  }
}

TEST_CASE("Random sequences of reads agree with the file", "[io_queue]") {
  constexpr int64_t kSize = 3 * kMiB + 321;
  const PatternFile direct(kSize), buffered(kSize, OpenMode::kRead);
  FaultyFileSystem fs(FileSystem::real(),
                      {{.kind = FaultKind::kShortRead, .bytes = 3000, .probability = 0.1},
                       {.kind = FaultKind::kReadError, .probability = 0.01},
                       {.kind = FaultKind::kSlowRead, .probability = 0.01, .delay = 1ms}},
                      11);
  const PatternFile wrapped(kSize, OpenMode::kReadDirect, &fs), wrapped_buffered(kSize, OpenMode::kRead, &fs);
  const std::vector<const PatternFile*> files = {&direct, &buffered, &wrapped, &wrapped_buffered};
  const auto twin = test::pattern(0, kSize);
  unsigned seed = 0;
  for (IoQueueOptions options : backends()) {
    std::mt19937 rng(++seed);
    const auto pick = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
    options.part_bytes = 16 * 4096;
    options.depth_bytes = kMiB;
    options.speculative_bytes = 256 * 1024;
    const auto queue = make_queue(options);
    struct Pending {
      IoTicket ticket;
      std::vector<IoPiece> pieces;
      std::vector<Buffer> buffers;
      bool inside = true, cancelled = false, faulty = false;
    };
    std::vector<Pending> pending;
    int wrong = 0, failed = 0;
    const auto check = [&](Pending& p) {
      const Status status = p.ticket.wait();
      bool good = true;
      for (const Buffer& buffer : p.buffers) good = good && buffer.guards_intact();
      if (p.cancelled) {
        good = good && status.code() == Code::kCancelled;
      } else if (!p.inside) {
        good = good && !status.ok();
      } else if (!status.ok()) {
        ++failed;  // two injected errors in a row, now and then
        good = good && p.faulty && status.code() == Code::kIo;
      } else {
        for (const IoPiece& piece : p.pieces) {
          good = good && std::memcmp(piece.dst, twin.data() + piece.offset, static_cast<size_t>(piece.bytes)) == 0;
        }
      }
      if (!good) ++wrong;
    };
    for (int i = 0; i < 2000; ++i) {
      Pending p;
      const int64_t n = 1 + pick(3);
      IoRead read;
      read.io_class = pick(2) == 0 ? IoClass::kDemand : IoClass::kSpeculative;
      for (int64_t k = 0; k < n; ++k) {
        const auto which = static_cast<size_t>(pick(4));
        const int64_t unit = pick(2) == 0 ? 4096 : 1;
        int64_t offset = pick(kSize) / unit * unit;
        int64_t bytes = std::max<int64_t>(pick(pick(20) == 0 ? 400000 : 20000) / unit * unit, unit);
        if (pick(100) != 0) bytes = std::min(bytes, kSize - offset);
        p.inside = p.inside && offset + bytes <= kSize;
        p.faulty = p.faulty || which >= 2;
        p.buffers.emplace_back(bytes, pick(2) == 0 ? 0 : pick(4096));
        read.pieces.push_back({files[which]->file.get(), offset, bytes, p.buffers.back().data()});
      }
      p.pieces = read.pieces;
      p.ticket = queue->submit(std::move(read));
      if (pick(10) == 0) p.ticket.promote();
      if (pick(20) == 0) p.cancelled = p.ticket.cancel();
      pending.push_back(std::move(p));
      while (pending.size() > 40) {
        const auto victim = static_cast<size_t>(pick(static_cast<int64_t>(pending.size())));
        check(pending[victim]);
        pending[victim] = std::move(pending.back());
        pending.pop_back();
      }
    }
    for (Pending& p : pending) check(p);
    CHECK(wrong == 0);
    CHECK(failed < 20);
    CHECK(queue->idle());
    CHECK(queue->stats().reads == 2000);
  }
}

// A file whose first `calls` requests to the kernel go to another descriptor, one that fails; the object reads well.
class MisdirectedFile : public File {
 public:
  MisdirectedFile(const File& inner, int fd, int calls) : inner_(inner), fd_(fd), calls_(calls) {}
  const std::string& path() const override { return inner_.path(); }
  Result<int64_t> size() const override { return inner_.size(); }
  int64_t direct_alignment() const override { return 0; }
  Status read_at(int64_t offset, std::span<std::byte> out) const override { return inner_.read_at(offset, out); }
  Result<int64_t> read_some_at(int64_t offset, std::span<std::byte> out) const override {
    return inner_.read_some_at(offset, out);
  }
  int descriptor() const override { return calls_.fetch_sub(1) > 0 ? fd_ : inner_.descriptor(); }
  Status write_at(int64_t, std::span<const std::byte>) override { return unsupported("a file for reading"); }
  Status sync() override { return {}; }

 private:
  const File& inner_;
  const int fd_;
  mutable std::atomic<int> calls_;
};

TEST_CASE("Errors that the kernel gives a ring are handled as those of a pread", "[io_queue]") {
  const PatternFile f(16 * 4096, OpenMode::kRead);
  // Nothing is mapped at 0: EIO. A folder: EISDIR.
  const int memory = ::open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  const int folder = ::open(f.folder.path().c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(memory >= 0);
  REQUIRE(folder >= 0);
  for (const bool polled : {false, true}) {
    IoQueueOptions options;
    options.sqpoll = polled;
    options.part_bytes = 4096;
    const auto queue = make_queue(options);
    if (!queue->refusal().empty()) break;  // no ring here
    const auto read = [&](const MisdirectedFile& file, const Buffer& out, int64_t bytes) {
      return queue->submit({{{&file, 0, bytes, out.data()}}, IoClass::kDemand, {}}).wait();
    };
    {
      const MisdirectedFile file(*f.file, memory, INT32_MAX);
      const Buffer out(4096, 0);
      const int64_t before = queue->stats().retried;
      const Status status = read(file, out, 4096);
      CHECK(status.code() == Code::kIo);
      CHECK(contains(status.message(), f.path));
      CHECK(contains(status.message(), "4096 bytes at offset 0 failed twice"));
      CHECK(queue->stats().retried == before + 1);
    }
    {
      // Asked for by submit() and by the first request; the second one reads the file.
      const MisdirectedFile file(*f.file, memory, 2);
      const Buffer out(4096, 0);
      const int64_t before = queue->stats().retried;
      const Status status = read(file, out, 4096);
      INFO(status.message());
      CHECK(status.ok());
      CHECK(out.holds_pattern(0));
      CHECK(queue->stats().retried == before + 1);
    }
    {
      const MisdirectedFile file(*f.file, folder, INT32_MAX);
      const Buffer out(4096, 0);
      const Status status = read(file, out, 4096);
      CHECK(status.code() == Code::kIo);
      CHECK(contains(status.message(), "Is a directory"));
      CHECK(queue->idle());
    }
  }
  for (const int fd : {memory, folder}) ::close(fd);
}

TEST_CASE("A file system that cannot read without blocking is read by threads", "[io_queue]") {
  if (!std::filesystem::is_directory("/dev/shm")) return;
  const TempFolder folder("/dev/shm");
  test::put_file(folder / "data", test::pattern(0, 3 * kMiB));
  const auto file = open_file(folder / "data", OpenMode::kRead);
  REQUIRE(file.ok());
  for (const IoQueueOptions& options : backends()) {
    const auto queue = make_queue(options);
    const Buffer out(3 * kMiB - 1, 1);
    CHECK(queue->submit({{{file->get(), 1, 3 * kMiB - 1, out.data()}}, IoClass::kDemand, {}}).wait().ok());
    CHECK(out.holds_pattern(1));
  }
}

}  // namespace
}  // namespace firn::storage
