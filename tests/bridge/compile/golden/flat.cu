extern "C" __global__ void __launch_bounds__(128) k0_kernel(float* __restrict__ in0_ptr, float* __restrict__ in1_ptr, float* __restrict__ out0_ptr, int n0, int n1, int n2);
extern "C" __global__ void __launch_bounds__(128) k0_kernel(float* __restrict__ in0_ptr, float* __restrict__ in1_ptr, float* __restrict__ out0_ptr, int n0, int n1, int n2) {
  if (((int)threadIdx.x) < ((n2 + n1) - (((int)blockIdx.x) * 128))) {
    if (((((int)blockIdx.x) * 128) + ((int)threadIdx.x)) < n2) {
      int row1 = 0;
      int position2 = (((((int)blockIdx.x) * 128) + ((int)threadIdx.x)) * 4);
      int base3 = (row1 * 4096);
      int at1 = (base3 + position2);
      int whole2 = (at1 >> 2);
      alignas(64) float x_ptr[4];
      *(float4*)(x_ptr + 0) = *(float4*)(in0_ptr + (whole2 * 4));
      int at3 = (base3 + position2);
      int whole4 = (at3 >> 2);
      alignas(64) float x_ptr_1[4];
      *(float4*)(x_ptr_1 + 0) = *(float4*)(in1_ptr + (whole4 * 4));
      alignas(64) float y_ptr[4];
      int at5 = ((row1 * 4096) + position2);
      int whole6 = (at5 >> 2);
      #pragma unroll
      for (int lane = 0; lane < 4; ++lane) {
        alignas(64) float v1_ptr[1];
        v1_ptr[0] = (x_ptr[lane] * 0x1p+1f/*2.000000e+00*/);
        alignas(64) float v2_ptr[1];
        v2_ptr[0] = (v1_ptr[0] + x_ptr_1[lane]);
        y_ptr[lane] = v2_ptr[0];
      }
      *(float4*)(out0_ptr + (whole6 * 4)) = *(float4*)(y_ptr + 0);
    } else {
      int row1_1 = 0;
      int position2_1 = (n0 + (((((int)blockIdx.x) * 128) + ((int)threadIdx.x)) - n2));
      int base3_1 = (row1_1 * 4096);
      alignas(64) float v1_ptr_1[1];
      v1_ptr_1[0] = in0_ptr[(base3_1 + position2_1)];
      alignas(64) float v2_ptr_1[1];
      v2_ptr_1[0] = in1_ptr[(base3_1 + position2_1)];
      alignas(64) float v1_ptr_2[1];
      v1_ptr_2[0] = (v1_ptr_1[0] * 0x1p+1f/*2.000000e+00*/);
      alignas(64) float v2_ptr_2[1];
      v2_ptr_2[0] = (v1_ptr_2[0] + v2_ptr_1[0]);
      out0_ptr[((row1_1 * 4096) + position2_1)] = v2_ptr_2[0];
    }
  }
}
