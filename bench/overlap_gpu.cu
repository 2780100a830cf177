// Measures the gain from overlap inside a captured step on this GPU, before anything is built for it.
//
//   nvcc -O3 -arch=native bench/overlap_gpu.cu -o overlap -lcublas && ./overlap
//
// Two questions, on the backward pass of 32 layers of `pretrain-226m` without its attention (products by cuBLAS, elementwise
// kernels with the memory traffic of norms, gated activations and rotations), as graphs in interleaved rounds:
//
//   side    Weight gradients on a second stream, joined again at most `window` launches later.
//   early   Elementwise kernels that are launched before the preceding product ends (programmatic dependent launch) and
//           wait for it on the device.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cublas_v2.h>

#define CHECK(call)                                                                  \
    do {                                                                             \
        int status_ = (int)(call);                                                   \
        if (status_) {                                                               \
            fprintf(stderr, "%s gave %d in line %d\n", #call, status_, __LINE__);    \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

const int LAYERS = 32, WIDTH = 768, FFN = 2048, QKV = 1280, TURNS = 9;

template <bool EARLY>
__global__ void combine(const uint4* a, const uint4* b, uint4* c, int count) {
    if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        uint4 x = a[i], y = b[i];
        c[i] = {x.x ^ (y.x & 1), x.y ^ (y.y & 1), x.z ^ (y.z & 1), x.w ^ (y.w & 1)};
    }
}

// Random bf16 numbers between -1 and 1: constant data would cost the matrix units less power.
__global__ void noise(unsigned* at, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        unsigned hash = (unsigned)i * 2654435761u;
        hash = (hash ^ hash >> 13) * 0x5bd1e995u;
        at[i] = (hash & 0x807f807fu) | 0x3f003f00u;
    }
}

struct Pass {
    int tokens, window;
    bool early;
    cudaStream_t streams[2];
    cublasHandle_t products[2];
    char *x, *y, *z, *w;
    float* sums;
    std::vector<cudaEvent_t> events;
    size_t used = 0;
    int launched = 0;
    std::vector<std::pair<int, cudaEvent_t>> joins;  // a launch, and what it waits for

    cudaEvent_t event() {
        if (used == events.size()) {
            cudaEvent_t made;
            CHECK(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
            events.push_back(made);
        }
        return events[used++];
    }

    // Joins the launches that are due, before the next launch.
    void next() {
        launched++;
        while (!joins.empty() && joins[0].first <= launched) {
            CHECK(cudaStreamWaitEvent(streams[0], joins[0].second, 0));
            joins.erase(joins.begin());
        }
    }

    // y[tokens, n] = x[tokens, k] w[n, k]^T
    void input_gradient(int n, int k) {
        float one = 1, zero = 0;
        CHECK(cublasGemmEx(products[0], CUBLAS_OP_T, CUBLAS_OP_N, n, tokens, k, &one, w, CUDA_R_16BF, k, x, CUDA_R_16BF, k, &zero,
                           y, CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        next();
    }

    // sums[n, k] += y[tokens, n]^T z[tokens, k]
    void weight_gradient(int n, int k, size_t at) {
        float one = 1;
        int stream = window > 0;
        if (stream) {
            cudaEvent_t ready = event();
            CHECK(cudaEventRecord(ready, streams[0]));
            CHECK(cudaStreamWaitEvent(streams[1], ready, 0));
        }
        CHECK(cublasGemmEx(products[stream], CUBLAS_OP_N, CUBLAS_OP_T, k, n, tokens, &one, z, CUDA_R_16BF, k, y, CUDA_R_16BF, n,
                           &one, sums + at, CUDA_R_32F, k, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        if (stream) {
            cudaEvent_t done = event();
            CHECK(cudaEventRecord(done, streams[1]));
            joins.push_back({launched + window, done});
        }
        next();
    }

    // Moves as many bytes as `tensors` bf16 tensors of [tokens, WIDTH].
    void elementwise(double tensors) {
        int count = (int)(tensors * tokens * WIDTH * 2 / 16 / 3);
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = (count + 255) / 256;
        config.blockDim = 256;
        config.stream = streams[0];
        config.attrs = &attribute;
        config.numAttrs = early;
        CHECK(cudaLaunchKernelEx(&config, early ? combine<true> : combine<false>, (const uint4*)x, (const uint4*)z, (uint4*)y, count));
        next();
    }

    void layer(size_t at) {
        weight_gradient(WIDTH, FFN, at);
        input_gradient(FFN, WIDTH);
        elementwise(16);
        weight_gradient(2 * FFN, WIDTH, at += WIDTH * FFN);
        input_gradient(WIDTH, 2 * FFN);
        elementwise(4);
        elementwise(1.5);
        weight_gradient(WIDTH, WIDTH, at += 2 * FFN * WIDTH);
        input_gradient(WIDTH, WIDTH);
        elementwise(3.3);
        elementwise(3.3);
        weight_gradient(QKV, WIDTH, at += WIDTH * WIDTH);
        input_gradient(WIDTH, QKV);
        elementwise(4);
        elementwise(1.5);
    }

    cudaGraphExec_t capture() {
        used = launched = 0;
        cudaGraph_t graph;
        cudaGraphExec_t made;
        CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < LAYERS; i++) layer((size_t)i << 23);
        for (auto& join : joins) CHECK(cudaStreamWaitEvent(streams[0], join.second, 0));
        joins.clear();
        CHECK(cudaStreamEndCapture(streams[0], &graph));
        CHECK(cudaGraphInstantiate(&made, graph, 0));
        return made;
    }
};

int main() {
    Pass pass = {};
    for (int i = 0; i < 2; i++) {
        void* scratch;
        CHECK(cudaStreamCreate(&pass.streams[i]));
        CHECK(cublasCreate(&pass.products[i]));
        CHECK(cublasSetStream(pass.products[i], pass.streams[i]));
        CHECK(cudaMalloc(&scratch, 64 << 20));
        CHECK(cublasSetWorkspace(pass.products[i], scratch, 64 << 20));
    }
    size_t bytes = (size_t)65536 * 2 * FFN * 2, sums = sizeof(float) * ((size_t)LAYERS << 23);
    for (char** tensor : {&pass.x, &pass.y, &pass.z, &pass.w}) {
        CHECK(cudaMalloc(tensor, bytes));
        noise<<<1024, 256>>>((unsigned*)*tensor, bytes / 4);
    }
    CHECK(cudaMalloc(&pass.sums, sums));
    CHECK(cudaMemset(pass.sums, 0, sums));
    struct { const char* name; int window; bool early; } forms[] = {
        {"in order", 0, false}, {"side 2", 2, false}, {"side 4", 4, false}, {"side 8", 8, false}, {"side 16", 16, false},
        {"early", 0, true}, {"side 4, early", 4, true}};
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int rows : {4, 8, 16, 32}) {
        pass.tokens = rows * 2048;
        std::vector<cudaGraphExec_t> graphs;
        for (auto& form : forms) {
            pass.window = form.window, pass.early = form.early;
            graphs.push_back(pass.capture());
        }
        std::vector<std::vector<float>> times(graphs.size());
        for (int turn = 0; turn < TURNS; turn++) {
            for (size_t i = 0; i < graphs.size(); i++) {
                float ms;
                CHECK(cudaEventRecord(begin, pass.streams[0]));
                CHECK(cudaGraphLaunch(graphs[i], pass.streams[0]));
                CHECK(cudaEventRecord(end, pass.streams[0]));
                CHECK(cudaStreamSynchronize(pass.streams[0]));
                CHECK(cudaEventElapsedTime(&ms, begin, end));
                times[i].push_back(ms);
            }
        }
        printf("%2d x 2048 tokens:", rows);
        for (size_t i = 0; i < graphs.size(); i++) {
            std::sort(times[i].begin(), times[i].end());
            printf("  %s %.2f ms (%.3f)", forms[i].name, times[i][TURNS / 2], times[0][TURNS / 2] / times[i][TURNS / 2]);
        }
        printf("\n");
    }
}
