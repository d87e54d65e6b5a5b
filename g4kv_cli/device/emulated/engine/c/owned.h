// Whose cells a block may read.
#pragma once
#include "engine.h"

void start_owned(Launch *c);  // a block begins
