// The main program of every test under Catch2 v2; v3 brings its own.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
