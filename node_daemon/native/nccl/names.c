#include "names.h"

#include <stddef.h>
#include <strings.h>

#include "tocsin_frame.h"

typedef struct name {
  const char* text;
  uint8_t code;
} name;

static const name kOps[] = {
    {"AllReduce", TOCSIN_OP_ALL_REDUCE},         {"AllGather", TOCSIN_OP_ALL_GATHER},
    {"ReduceScatter", TOCSIN_OP_REDUCE_SCATTER}, {"Broadcast", TOCSIN_OP_BROADCAST},
    {"Reduce", TOCSIN_OP_REDUCE},                {"AlltoAll", TOCSIN_OP_ALL_TO_ALL},
    {"Gather", TOCSIN_OP_GATHER},                {"Scatter", TOCSIN_OP_SCATTER},
    {"Send", TOCSIN_OP_SEND},                    {"Recv", TOCSIN_OP_RECV},
};

static const name kDtypes[] = {
    {"ncclFloat32", TOCSIN_DTYPE_FLOAT32}, {"ncclBfloat16", TOCSIN_DTYPE_BFLOAT16},
    {"ncclFloat16", TOCSIN_DTYPE_FLOAT16}, {"ncclFloat64", TOCSIN_DTYPE_FLOAT64},
    {"ncclInt8", TOCSIN_DTYPE_INT8},       {"ncclUint8", TOCSIN_DTYPE_UINT8},
    {"ncclInt32", TOCSIN_DTYPE_INT32},     {"ncclInt64", TOCSIN_DTYPE_INT64},
};

static const name kAlgos[] = {
    {"Ring", TOCSIN_ALGO_RING},
    {"Tree", TOCSIN_ALGO_TREE},
    {"NVLS", TOCSIN_ALGO_NVLS},
    {"NVLS_TREE", TOCSIN_ALGO_NVLS_TREE},
    {"COLLNET_DIRECT", TOCSIN_ALGO_COLLNET_DIRECT},
    {"COLLNET_CHAIN", TOCSIN_ALGO_COLLNET_CHAIN},
    {"PAT", TOCSIN_ALGO_PAT},
};

static const name kProtos[] = {
    {"SIMPLE", TOCSIN_PROTO_SIMPLE},
    {"LL", TOCSIN_PROTO_LL},
    {"LL128", TOCSIN_PROTO_LL128},
};

// 0, "unknown", where NCCL tells no name. It has none for uint8 and says "Unknown".
static uint8_t find(const name* names, size_t count, const char* text, uint8_t other) {
  if (!text || !*text || strcasecmp(text, "Unknown") == 0) {
    return 0;
  }
  for (size_t i = 0; i < count; ++i) {
    if (strcasecmp(names[i].text, text) == 0) {
      return names[i].code;
    }
  }
  return other;
}

#define FIND(names, text, other) find(names, sizeof(names) / sizeof *(names), text, other)

uint8_t op_of(const char* function) { return FIND(kOps, function, TOCSIN_OP_UNKNOWN); }

uint8_t dtype_of(const char* datatype) { return FIND(kDtypes, datatype, TOCSIN_DTYPE_OTHER); }

uint8_t algo_of(const char* algorithm) { return FIND(kAlgos, algorithm, TOCSIN_ALGO_OTHER); }

uint8_t proto_of(const char* protocol) { return FIND(kProtos, protocol, TOCSIN_PROTO_OTHER); }

bool has_root(uint8_t op) {
  return op == TOCSIN_OP_BROADCAST || op == TOCSIN_OP_REDUCE || op == TOCSIN_OP_GATHER || op == TOCSIN_OP_SCATTER;
}
