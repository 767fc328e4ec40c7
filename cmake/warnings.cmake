# Flags every file of ours is compiled with. -ffp-contract=off and no -ffast-math: the bits of an answer are part of the
# contract, so fused multiply-add appears only where a kernel writes it.
add_library(firn_flags INTERFACE)
target_compile_options(firn_flags INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Werror
                       -fno-math-errno -ffp-contract=off -fno-omit-frame-pointer)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 sees overlapping copies in std::string's own code (GCC bug 105651).
  target_compile_options(firn_flags INTERFACE -Wno-restrict)
  if(FIRN_SANITIZE)
    # The sanitizers' own checks hide from g++ that the standard library's objects (std::regex) are initialised.
    target_compile_options(firn_flags INTERFACE -Wno-maybe-uninitialized)
  endif()
endif()
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  target_compile_options(firn_flags INTERFACE -g1)
endif()
if(FIRN_SANITIZE STREQUAL "address+undefined")
  target_compile_options(firn_flags INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=all)
  target_link_options(firn_flags INTERFACE -fsanitize=address,undefined)
  target_compile_definitions(firn_flags INTERFACE FIRN_ASAN=1)
elseif(FIRN_SANITIZE STREQUAL "thread")
  target_compile_options(firn_flags INTERFACE -fsanitize=thread)
  target_link_options(firn_flags INTERFACE -fsanitize=thread)
  target_compile_definitions(firn_flags INTERFACE FIRN_TSAN=1)
elseif(FIRN_SANITIZE)
  message(FATAL_ERROR "FIRN_SANITIZE=${FIRN_SANITIZE}: expected address+undefined, thread or empty")
endif()
