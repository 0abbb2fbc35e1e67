# 64-bit Windows with Debian's gcc-mingw-w64-x86-64-posix. To see that it compiles: gcc does not align
# Windows' stacks for the vectors of AVX, so a library to be used is built with zig.cmake.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
set(CMAKE_RC_COMPILER x86_64-w64-mingw32-windres)
