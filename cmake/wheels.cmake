# Lets this package be built against the ROS 2 wheels of PyPI, in a virtual environment where
# nothing is sourced. Included right after project(), by -DCMAKE_PROJECT_INCLUDE=cmake/wheels.cmake;
# not used on a ROS 2 installed with apt.

# The wheels install CMake packages below the prefix of the Python environment. Where the build
# is isolated that is pip's temporary one, so ask Python instead of reading VIRTUAL_ENV.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND "${Python3_EXECUTABLE}" -c
    "import ament_package, pathlib; print(pathlib.Path(ament_package.__file__).parents[4])"
  OUTPUT_VARIABLE wheels_prefix
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE wheels_missing
)
if(wheels_missing)
  message(FATAL_ERROR "${Python3_EXECUTABLE} has no ROS 2 wheels: "
    "install requirements/ros-<distro>.txt and requirements/ros-<distro>-build.txt first")
endif()
list(PREPEND CMAKE_PREFIX_PATH "${wheels_prefix}")
# ament looks up its resources by this variable.
set(ENV{AMENT_PREFIX_PATH} "${wheels_prefix}")

# The Python libraries of interface packages export the include directory of NumPy as an absolute
# path. In the wheels it is one of the machine they were built on, and CMake refuses imported
# targets with directories that do not exist; ours is in the environment, and CMake refuses to
# export a directory below the source folder, where `make` has the environment. Nobody compiles
# against these libraries. Deferred to the end of CMakeLists.txt, when all targets are known.
function(wheels_drop_numpy_includes)
  get_property(imported DIRECTORY PROPERTY IMPORTED_TARGETS)
  get_property(ours DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
  set(targets ${imported} ${ours})
  list(FILTER targets INCLUDE REGEX "__rosidl_generator_py$")
  foreach(target IN LISTS targets)
    set_property(TARGET ${target} PROPERTY INTERFACE_INCLUDE_DIRECTORIES "")
  endforeach()
endfunction()
cmake_language(DEFER CALL wheels_drop_numpy_includes)
