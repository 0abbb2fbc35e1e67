# 64-bit ARM with Debian's gcc-aarch64-linux-gnu; loads on that Debian's glibc and newer ones.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
