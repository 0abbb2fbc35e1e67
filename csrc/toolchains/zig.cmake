# Any target with one compiler, zig's (`pip install ziglang`), which brings every system's headers and
# libraries along:
#   ZIG=.../ziglang/zig ZIG_TARGET=aarch64-linux-gnu.2.28 cmake --toolchain toolchains/zig.cmake ...
# The number behind gnu is the oldest glibc that the library shall load on.
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "$ENV{ZIG_TARGET}")
if("$ENV{ZIG_TARGET}" MATCHES "windows")
  set(CMAKE_SYSTEM_NAME Windows)
  set(CMAKE_RC_COMPILER "$ENV{ZIG}" rc)
elseif("$ENV{ZIG_TARGET}" MATCHES "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()
set(CMAKE_C_COMPILER "$ENV{ZIG}" cc -target $ENV{ZIG_TARGET})
